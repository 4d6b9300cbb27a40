"""Lengths and directions of vectors, smooth and finite at zero too."""

from torch import Tensor

from linattn.ops.shared.packing import compute_dtype

# Lengths are sqrt(|x|^2 + SMALLEST^2): no vector of usual size changes, and 0 has a direction (0) and a gradient.
SMALLEST = 1e-6


def length_of(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """``|x|`` over ``dim``, which is kept with size 1, in fp32 or fp64."""
    return (x.to(compute_dtype(x)).square().sum(dim, keepdim=True) + SMALLEST**2).sqrt()


def direction_of(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """``x / |x|`` over ``dim``, in fp32 or fp64; 0 at 0."""
    x = x.to(compute_dtype(x))
    return x * (x.square().sum(dim, keepdim=True) + SMALLEST**2).rsqrt()  # a quotient has a longer gradient
