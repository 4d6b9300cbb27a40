"""Rotations of features by the positions of their tokens: any function, or angles that kernels can read."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# A function that turns the features of queries and keys, each (B, H, T, K).
Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Turns(NamedTuple):
    """Cosines and sines ``(T, W / 2)`` of the angles by which the pairs of W channels are turned.

    They are fp32 or fp64 and have no gradient. Wider features are blocks of W channels that are all turned alike.
    """

    cos: Tensor
    sin: Tensor


class Rotation(ABC):
    """A ``Rotate`` of pairs of neighbouring channels by angles that depend only on the token's position."""

    @abstractmethod
    def of_queries(self, features: int, like: Tensor) -> Turns:
        """The turns of queries with ``features`` channels, on the device and for the precision of ``like``."""

    @abstractmethod
    def of_keys(self, features: int, like: Tensor) -> Turns:
        """The turns of keys with ``features`` channels, on the device and for the precision of ``like``."""

    def __call__(self, phi: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
        return (
            turn_pairs(phi, self.of_queries(phi.shape[-1], phi)),
            turn_pairs(psi, self.of_keys(psi.shape[-1], psi)),
        )


def turn_pairs(x: Tensor, turns: Turns) -> Tensor:
    """Turn pairs of channels ``(a, b)`` of ``x (..., T, K)`` to ``(a cos - b sin, a sin + b cos)``, rounded once."""
    cos, sin = turns
    blocks = x.shape[-1] // (2 * cos.shape[-1])
    if blocks > 1:
        cos, sin = cos.repeat(1, blocks), sin.repeat(1, blocks)
    a, b = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)
