"""Lengths and directions of vectors, smooth and finite at zero too, and the dtype of outputs."""

import torch
from torch import Tensor

from linattn.ops.maps.powers import direction_of, length_of
from linattn.ops.shared.checks import autocast_dtype

__all__ = ["direction_of", "length_of", "output_dtype"]


def output_dtype(q: Tensor, v: Tensor) -> torch.dtype:
    """The dtype that attention of these inputs returns, for mechanisms that compute in a more precise one."""
    return v.dtype if v.dtype == torch.float64 else autocast_dtype(q) or v.dtype
