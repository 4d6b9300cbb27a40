"""Converts inputs to widths and strides that kernels are proved for. Used by all causal kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.kernels.common.layout import is_token_major

NARROWEST = 64  # fewest columns of a state whose other side is wider than 128, if heads are shared


def missing(width: int, dtype: torch.dtype, tf32: bool = False) -> int:
    """Columns of zeros that make a 16-bit width a multiple of 16: with masked tails products are wrong on Hopper.

    tf32: fp32 multiplies on the same tensor cores. Zeros change no score, and their own outputs and gradients are cut
    off again.
    """
    return -width % 16 if dtype.itemsize == 2 or tf32 else 0


def missing_of_both(q: Tensor, k: Tensor, v: Tensor, tf32: bool = False) -> tuple[int, int]:
    """Columns of zeros for q and k, and for v: as :func:`missing`, and more in bf16 if query heads share a key head.

    In a loop over these heads, a state of more than 128 by less than 64 makes Triton 3.6 read invalid addresses
    (H200: 192 to 256 by 16 or 32, in both walks; it is right by 64, without shared heads, and in other dtypes).
    """
    K, V = q.shape[3], v.shape[3]
    more_k, more_v = missing(K, q.dtype, tf32), missing(V, q.dtype, tf32)
    if q.dtype == torch.bfloat16 and q.shape[1] != k.shape[1] and max(K, V) > 128:
        return max(more_k, NARROWEST - K), max(more_v, NARROWEST - V)
    return more_k, more_v


def padded_by(x: Tensor, columns: int, rows: int = 0) -> Tensor:
    """x with zeros after the last column and the last row, in the memory order of x; x itself if none are added."""
    if columns and not rows and x.ndim == 4 and is_token_major(x):
        return F.pad(x.transpose(1, 2), (0, columns)).transpose(1, 2)
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


def first_of(x: Tensor, dim: int, width: int) -> Tensor:
    """The first ``width`` columns, without gaps and in the memory order of x; x itself if these are all."""
    return x if x.shape[dim] == width else x.narrow(dim, 0, width).clone()


def reachable(x: Tensor) -> Tensor:
    """``x (B, H, T, D)``, or a copy that kernels can read.

    Offsets inside a tile are 32-bit, and rows of 16-bit numbers are read in whole vectors of 16 bytes.
    """
    far = max(x.stride()[2:]) * 256 >= 2**30
    odd = x.itemsize == 2 and (x.stride(3) != 1 or x.data_ptr() % 16 != 0 or any(s % 8 for s in x.stride()[:3]))
    return x.clone(memory_format=torch.contiguous_format) if far or odd else x


def reachable_gradient(x: Tensor) -> Tensor:
    """:func:`reachable`, with the same layout for every loss: the gradient of a sum comes as one number, expanded.

    Kernels compiled for strides of 0 would sum in another order, and would be compiled in addition to the others.
    """
    return x.contiguous() if 0 in x.stride() else reachable(x)
