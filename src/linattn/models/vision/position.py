"""Absolute positions of patches, for a plane of any size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.shared.call import compute_dtype

POSITIONS = ("learned", "sincos")


def resize_positions(
    positions: Tensor, grid: tuple[int, int], spatial_shape: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Resize learned positions ``(1, prefix + grid, C)`` to another plane; those of prefix tokens stay."""
    if grid == spatial_shape:
        return positions
    prefix, plane = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    plane = plane.transpose(1, 2).unflatten(2, grid)
    plane = F.interpolate(plane, size=spatial_shape, mode="bicubic", antialias=True)
    return torch.cat([prefix, plane.flatten(2).transpose(1, 2)], dim=1)


def sincos_positions(spatial_shape: tuple[int, int], dim: int, like: Tensor) -> Tensor:
    """``(1, height width, C)``: a quarter of the channels each for sin and cos of the column, sin and cos of the row.

    Frequencies ``10000^(-i / (C/4))``, i = 0 ... C/4 - 1, as in MoCo v3.
    """
    quarter, dtype = dim // 4, compute_dtype(like)
    frequencies = 10000.0 ** (-torch.arange(quarter, dtype=dtype, device=like.device) / quarter)
    height, width = spatial_shape
    columns = torch.arange(width, dtype=dtype, device=like.device).repeat(height)[:, None] * frequencies
    rows = torch.arange(height, dtype=dtype, device=like.device).repeat_interleave(width)[:, None] * frequencies
    return torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=1).unsqueeze(0).to(like.dtype)
