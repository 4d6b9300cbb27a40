"""Vectors as length times direction, smooth and finite at zero too."""

import torch
from torch import Tensor

from linattn.ops.checks import autocast_dtype
from linattn.ops.packing import compute_dtype

# Lengths are sqrt(|x|^2 + SMALLEST^2): vectors that carry anything are not moved, 0 has a direction (0) and a gradient.
SMALLEST = 1e-6


def length_of(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """``|x|`` over ``dim``, kept, in fp32 or fp64."""
    return (x.to(compute_dtype(x)).square().sum(dim, keepdim=True) + SMALLEST**2).sqrt()


def direction_of(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """``x / |x|`` over ``dim``, in fp32 or fp64; 0 at 0."""
    return x.to(compute_dtype(x)) / length_of(x, dim)


def output_dtype(q: Tensor, v: Tensor) -> torch.dtype:
    """What an attention of these inputs returns, for mechanisms that hand over more precise ones."""
    return v.dtype if v.dtype == torch.float64 else autocast_dtype(q) or v.dtype
