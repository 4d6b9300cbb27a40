"""Rotary positions of a line of tokens."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.packing import compute_dtype


class Rotation(NamedTuple):
    """Cosines and sines ``(B, 1, T, W / 2)``, by which W channels are turned; fp32 or fp64."""

    cos: Tensor
    sin: Tensor


def rotations(positions: Tensor, widths: Iterable[int], base: float, like: Tensor) -> dict[int, Rotation]:
    """One rotation per width W that is not 0, by the angles ``positions (B, T)`` times ``base^(-2i / W)``."""
    dtype, found = compute_dtype(like), {}
    for width in sorted(set(widths) - {0}):
        exponents = torch.arange(0, width, 2, dtype=dtype, device=like.device) / width
        angle = (positions.to(like.device, dtype).unsqueeze(-1) * base**-exponents).unsqueeze(1)
        found[width] = Rotation(angle.cos(), angle.sin())
    return found


def turn(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn channel i and channel ``W / 2 + i`` of ``x (B, H, T, D)`` together; those past W stay.

    The halves lie as Llama has them, so that weights fit. Rounded to x's dtype once.
    """
    cos, sin = rotation
    half = cos.shape[-1]
    a, b = x[..., : 2 * half].to(cos.dtype).chunk(2, dim=-1)
    first, second = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
    turned = torch.cat([first, second], dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat([turned, x[..., 2 * half :]], dim=-1)
