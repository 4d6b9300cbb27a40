"""Widths and strides that kernels are proved for, made of those that come. Used by all causal kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.triton.layout import is_token_major


def missing(width: int, dtype: torch.dtype) -> int:
    """Columns of zeros that a 16-bit width lacks to a multiple of 16: with masked tails Hopper computes wrong products.

    Zeros change no score, and their own outputs and gradients are cut off again.
    """
    return -width % 16 if dtype.itemsize == 2 else 0


def padded_by(x: Tensor, columns: int, rows: int = 0) -> Tensor:
    """With zeros after the last column and the last row, in the order of x; x itself where there are none."""
    if columns and not rows and x.ndim == 4 and is_token_major(x):
        return F.pad(x.transpose(1, 2), (0, columns)).transpose(1, 2)
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


def first_of(x: Tensor, dim: int, width: int) -> Tensor:
    """The first columns, without gaps and in the order of x; all of them: x itself."""
    return x if x.shape[dim] == width else x.narrow(dim, 0, width).clone()


def reachable(x: Tensor) -> Tensor:
    """``x (B, H, T, D)``, or a copy that kernels can read.

    Offsets inside a tile are 32-bit, and rows of 16-bit numbers are read in whole vectors of 16 bytes.
    """
    far = max(x.stride()[2:]) * 256 >= 2**30
    odd = x.itemsize == 2 and (x.stride(3) != 1 or x.data_ptr() % 16 != 0 or any(s % 8 for s in x.stride()[:3]))
    return x.clone(memory_format=torch.contiguous_format) if far or odd else x


def reachable_gradient(x: Tensor) -> Tensor:
    """:func:`reachable`, and as it is from every loss: that of a sum is one number, expanded.

    Kernels compiled for strides of 0 would sum in another order, and come on top of those of other losses.
    """
    return x.contiguous() if 0 in x.stride() else reachable(x)
