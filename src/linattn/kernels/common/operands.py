"""The common dtype of the operands of a matrix product."""

from functools import reduce

import torch
from torch import Tensor


def one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to their common dtype: autocast mixes dtypes and steep maps widen them, but products need one."""
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(dtype) for x in tensors)
