"""Rotary positions of a line of tokens."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.packing import compute_dtype


class Rotation(NamedTuple):
    """Cosines and sines ``(B, 1, T, W)``, by which W channels are turned; fp32 or fp64.

    Each angle stands in both halves, its sine in the first one with a minus.
    """

    cos: Tensor
    sin: Tensor


def rotations(positions: Tensor, widths: Iterable[int], base: float, like: Tensor) -> dict[int, Rotation]:
    """One rotation per width W that is not 0, by the angles ``positions (B, T)`` times ``base^(-2i / W)``."""
    dtype, found = compute_dtype(like), {}
    for width in sorted(set(widths) - {0}):
        exponents = torch.arange(0, width, 2, dtype=dtype, device=like.device) / width
        angle = (positions.to(like.device, dtype).unsqueeze(-1) * base**-exponents).unsqueeze(1)
        cos, sin = angle.cos(), angle.sin()
        found[width] = Rotation(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
    return found


def turn(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn channel i and channel ``W / 2 + i`` of ``x (B, H, T, D)`` together; those past W stay.

    The halves lie as Llama has them, so that weights fit. Rounded to x's dtype once.
    """
    cos, sin = rotation
    width = cos.shape[-1]
    part = x[..., :width]
    if torch.is_grad_enabled():  # both ways to x are then one in cos's dtype: a gradient is rounded once too
        part = part.to(cos.dtype)
    a, b = part.chunk(2, dim=-1)
    turned = torch.addcmul(part * cos, torch.cat([b, a], dim=-1), sin).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)
