"""2-D rotary positions, for features of any width."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.packing import compute_dtype

WIDTHS = ("features", "blocks")
BASE = 10000.0


def plane_positions(
    spatial_shape: tuple[int, int], num_prefix_tokens: int, stride: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Row and column of every token ``(T,)``; a prefix token stands at (0, 0), where nothing turns.

    Tokens that stand for ``stride x stride`` others stand in their middle.
    """
    rows, columns = (torch.arange(n, device=device) * stride + (stride - 1) / 2 for n in spatial_shape)
    height, width = spatial_shape
    both = rows.repeat_interleave(width), columns.repeat(height)
    return F.pad(both[0], (num_prefix_tokens, 0)), F.pad(both[1], (num_prefix_tokens, 0))


def angles(rows: Tensor, columns: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """``(T, width / 2)``, one angle per pair: a quarter of the channels' worth for rows, as many for columns.

    ``angle_i = position 10000^(-i / (width / 4 - 1))``, i = 0, 1, ..., as in RALA's and NaLaFormer's code.
    """
    frequencies = BASE ** -torch.linspace(0, 1, width // 4, dtype=dtype, device=rows.device)
    return torch.cat([p.to(dtype)[:, None] * frequencies for p in (rows, columns)], dim=-1)


def rotate_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Turn neighbouring channels ``(a, b)`` of ``x (..., T, W)`` by ``angle (T, W / 2)``."""
    a, b = x.to(angle.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def plane_rotation(
    query_shape: tuple[int, int],
    *,
    width: int | None = None,
    num_prefix_tokens: int = 0,
    key_shape: tuple[int, int] | None = None,
    stride: int = 1,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A ``rotate`` for mechanisms: features ``(B, H, T, K)``, turned in blocks of ``width`` channels.

    Args:
        query_shape: plane of the queries.
        width: channels that share one set of frequencies: K itself (None), or the width of a head for features that
            are several blocks side by side (NaLaFormer turns each of its halves so).
        num_prefix_tokens: tokens before the plane; they are not turned.
        key_shape, stride: plane of the keys, each of which stands for ``stride x stride`` tokens.
    """

    def turn(x: Tensor, shape: tuple[int, int], step: int) -> Tensor:
        features = x.shape[-1]
        own = features if width is None else width
        if features % own or own % 4:
            raise ValueError(
                f"rotary positions turn {own} channels at a time, pairs of them by row and by column: that must be a "
                f"multiple of 4 and divide the {features} features of the mechanism"
            )
        rows, columns = plane_positions(shape, num_prefix_tokens, step, x.device)
        table = angles(rows, columns, own, compute_dtype(x))
        return rotate_pairs(x, table.repeat(1, features // own))

    def rotate(phi: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
        return turn(phi, query_shape, 1), turn(psi, key_shape or query_shape, stride)

    return rotate
