"""Rotary positions: of an image plane, for features of any width, and of a sequence, for queries and keys."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from linattn.mechanisms.base import Mechanism
from linattn.ops.shared.call import compute_dtype
from linattn.ops.shared.rotation import Rotation, Turns

WIDTHS = ("features", "blocks")
BASE = 10000.0
# How many planes' cosines and sines are kept, one for each stage and image size. Beyond that all are forgotten.
MOST = 64


def turned_channels(rotary: str, mechanism: Mechanism) -> tuple[int, int]:
    """How many channels per head are turned, and how many of them share one set of frequencies.

    Example:
        >>> from linattn import create_mechanism
        >>> turned_channels("blocks", create_mechanism("nala", num_heads=2, head_dim=8))
        (16, 8)
    """
    channels = mechanism.turned_width
    return channels, channels if rotary == "features" else mechanism.head_dim


def makes_pairs(channels: int, width: int) -> bool:
    """Whether ``channels`` split into blocks of ``width``, and blocks into as many pairs for rows as for columns."""
    return channels % width == 0 and width % 4 == 0


@dataclass(frozen=True)
class Plane:
    """A plane of tokens after prefix tokens, which are at (0, 0).

    Each token of the plane stands for ``stride x stride`` others, and is at their centre.
    """

    shape: tuple[int, int]
    num_prefix_tokens: int
    stride: int

    def turns(self, width: int, device: torch.device, dtype: torch.dtype) -> Turns:
        """Of angles ``(T, width / 2)``, one per pair of channels: ``width / 4`` for rows, then as many for columns.

        ``angle_i = position 10000^(-i / (width / 4 - 1))``, i = 0, 1, ..., as in RALA's and NaLaFormer's code.
        """
        frequencies = BASE ** -torch.linspace(0, 1, width // 4, dtype=dtype, device=device)
        rows, columns = (torch.arange(n, device=device) * self.stride + (self.stride - 1) / 2 for n in self.shape)
        places = (rows.repeat_interleave(self.shape[1]), columns.repeat(self.shape[0]))
        padded = (F.pad(place, (self.num_prefix_tokens, 0)).to(dtype) for place in places)
        table = torch.cat([place[:, None] * frequencies for place in padded], dim=-1)
        return Turns(table.cos(), table.sin())


_kept: dict[tuple[object, ...], Turns] = {}


def turns_of(plane: Plane, width: int, device: torch.device, dtype: torch.dtype) -> Turns:
    """The plane's cosines and sines, kept from call to call."""
    if not _may_keep(device):
        return plane.turns(width, device, dtype)
    # Kept per stream: another one would have to wait until they are computed.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (plane, width, device, dtype, stream)
    found = _kept.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # a later call may have gradients
            found = plane.turns(width, device, dtype)
        if len(_kept) >= MOST:
            _kept.clear()
        _kept[key] = found
    return found


def _may_keep(device: torch.device) -> bool:
    """Whether results may be kept: not fake tensors of a compiler, mode or transform, nor memory of a captured graph.

    A captured graph does not read kept tensors either: they might be forgotten while the graph is still in use.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False)
class PlaneRotation(Rotation):
    """See :func:`plane_rotation`."""

    queries: Plane
    keys: Plane
    width: int | None

    def of_queries(self, features: int, like: Tensor) -> Turns:
        return turns_of(self.queries, self._width_of(features), like.device, compute_dtype(like))

    def of_keys(self, features: int, like: Tensor) -> Turns:
        return turns_of(self.keys, self._width_of(features), like.device, compute_dtype(like))

    def _width_of(self, features: int) -> int:
        own = features if self.width is None else self.width
        if not makes_pairs(features, own):
            raise ValueError(
                f"rotary positions turn {own} channels at a time, half of them by row and half by column, in pairs: "
                f"{own} must be a multiple of 4 and divide the {features} features of the mechanism"
            )
        return own


def plane_rotation(
    query_shape: tuple[int, int],
    *,
    width: int | None = None,
    num_prefix_tokens: int = 0,
    key_shape: tuple[int, int] | None = None,
    stride: int = 1,
) -> PlaneRotation:
    """2-D rotary positions as a ``rotate`` for mechanisms, which turns features ``(B, H, T, K)`` over a plane.

    Args:
        query_shape: plane of the queries.
        width: number of channels that share one set of frequencies: all K (None), or the width of a head for features
            that are several blocks side by side (NaLaFormer turns each of its halves this way).
        num_prefix_tokens: number of tokens before the plane; they are not turned.
        key_shape, stride: plane of the keys, each of which stands for ``stride x stride`` tokens.
    """
    keys = Plane(key_shape or query_shape, num_prefix_tokens, stride)
    return PlaneRotation(Plane(query_shape, num_prefix_tokens, 1), keys, width)


class SequenceRotary(NamedTuple):
    """Cosines and sines ``(B, 1, T, W)`` by which W channels of a sequence's heads are rotated; fp32 or fp64.

    Each angle appears in both halves of W; its sine is negative in the first half.
    """

    cos: Tensor
    sin: Tensor


def rotations(positions: Tensor, widths: Iterable[int], base: float, like: Tensor) -> dict[int, SequenceRotary]:
    """One rotation for each width W that is not 0, with the angles ``positions (B, T)`` times ``base^(-2i / W)``."""
    dtype, by_width = compute_dtype(like), {}
    for width in sorted(set(widths) - {0}):
        exponents = torch.arange(0, width, 2, dtype=dtype, device=like.device) / width
        angle = (positions.to(like.device, dtype).unsqueeze(-1) * base**-exponents).unsqueeze(1)
        cos, sin = angle.cos(), angle.sin()
        by_width[width] = SequenceRotary(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
    return by_width


def rotate_halves(x: Tensor, rotation: SequenceRotary) -> Tensor:
    """Rotate channels i and ``W / 2 + i`` of ``x (B, H, T, D)`` as a pair; channels from W on stay as they are.

    The halves lie as in Llama, so that its weights fit. The result is rounded to x's dtype once.
    """
    cos, sin = rotation
    width = cos.shape[-1]
    part = x[..., :width]
    if torch.is_grad_enabled():  # both paths to x then join in cos's dtype: the gradient too is rounded once
        part = part.to(cos.dtype)
    a, b = part.chunk(2, dim=-1)
    rotated = torch.addcmul(part * cos, torch.cat([b, a], dim=-1), sin).to(x.dtype)
    return rotated if width == x.shape[-1] else torch.cat([rotated, x[..., width:]], dim=-1)
