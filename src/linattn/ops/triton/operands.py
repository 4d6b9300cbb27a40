"""What the operands of a matrix product share."""

from functools import reduce

import torch
from torch import Tensor


def one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Autocast mixes dtypes and steep maps widen them; the operands of a product share one."""
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(dtype) for x in tensors)
