"""Tokens as an image: prefix tokens (class token, registers) first, then the rows of the plane one after another."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import mechanism_info, mechanism_options


def check_plane(length: int, spatial_shape: tuple[int, int] | None, num_prefix_tokens: int, part: str) -> None:
    """Raise unless the prefix and the plane make up ``length`` tokens; ``part`` names who needs it in the message."""
    if spatial_shape is None:
        raise ValueError(f"{part} needs spatial_shape=(height, width) of the tokens, got None")
    if len(spatial_shape) != 2 or not all(isinstance(n, int) and n >= 1 for n in spatial_shape):
        raise ValueError(f"spatial_shape must be (height, width), integers >= 1, got {spatial_shape!r}")
    height, width = spatial_shape
    if num_prefix_tokens + height * width != length:
        raise ValueError(
            f"spatial_shape {height} x {width} and {num_prefix_tokens} prefix tokens make "
            f"{num_prefix_tokens + height * width} tokens, got {length}"
        )


def to_plane(x: Tensor, spatial_shape: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """``(B, T, C)`` to ``(B, C, height, width)``, without the prefix."""
    return x[:, num_prefix_tokens:].transpose(1, 2).unflatten(2, spatial_shape)


def from_plane(plane: Tensor, num_prefix_tokens: int) -> Tensor:
    """``(B, C, height, width)`` to ``(B, T, C)``, with zeros for the prefix."""
    return F.pad(plane.flatten(2).transpose(1, 2), (0, 0, num_prefix_tokens, 0))


def wipe(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zero the masked tokens of ``x (B, T, C)``: a convolution would carry them to their neighbours."""
    return x if key_mask is None else x.masked_fill(~key_mask.unsqueeze(-1), 0)


def prefix_option(mechanism: str, num_prefix_tokens: int, given: Any) -> dict[str, Any]:
    """The ``given`` options of a mechanism, and ``num_prefix_tokens`` if it has that option and there are any."""
    wants = num_prefix_tokens > 0 and "num_prefix_tokens" in mechanism_options(mechanism_info(mechanism).cls)
    return ({"num_prefix_tokens": num_prefix_tokens} if wants else {}) | dict(given)


def mechanism_plane(
    mechanism: Mechanism, spatial_shape: tuple[int, int] | None, num_prefix_tokens: int
) -> tuple[int, int] | None:
    """The shape of the plane that a mechanism is given, or None, with which it takes all tokens as a line.

    It is None if the mechanism expects another number of tokens before the plane, and would take them for a part of it.
    """
    return spatial_shape if getattr(mechanism, "num_prefix_tokens", 0) == num_prefix_tokens else None
