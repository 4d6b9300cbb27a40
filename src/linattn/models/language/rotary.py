"""Rotary positions of tokens in a sequence."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.shared.call import compute_dtype


class Rotation(NamedTuple):
    """Cosines and sines ``(B, 1, T, W)`` by which W channels are turned; fp32 or fp64.

    Each angle appears in both halves of W; its sine is negative in the first half.
    """

    cos: Tensor
    sin: Tensor


def rotations(positions: Tensor, widths: Iterable[int], base: float, like: Tensor) -> dict[int, Rotation]:
    """One rotation for each width W that is not 0, with the angles ``positions (B, T)`` times ``base^(-2i / W)``."""
    dtype, found = compute_dtype(like), {}
    for width in sorted(set(widths) - {0}):
        exponents = torch.arange(0, width, 2, dtype=dtype, device=like.device) / width
        angle = (positions.to(like.device, dtype).unsqueeze(-1) * base**-exponents).unsqueeze(1)
        cos, sin = angle.cos(), angle.sin()
        found[width] = Rotation(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
    return found


def turn(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate channels i and ``W / 2 + i`` of ``x (B, H, T, D)`` as a pair; channels from W on stay as they are.

    The halves lie as in Llama, so that its weights fit. The result is rounded to x's dtype once.
    """
    cos, sin = rotation
    width = cos.shape[-1]
    part = x[..., :width]
    if torch.is_grad_enabled():  # both paths to x then join in cos's dtype: the gradient too is rounded once
        part = part.to(cos.dtype)
    a, b = part.chunk(2, dim=-1)
    turned = torch.addcmul(part * cos, torch.cat([b, a], dim=-1), sin).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)
