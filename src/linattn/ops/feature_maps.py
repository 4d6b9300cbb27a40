"""Feature maps as small frozen values, named by what they compute.

A map turns ``(..., D)`` into ``(..., F)`` features. ``linear_attention(..., feature_map=EluPlusOne())``
applies it to q and k; a pair ``(map_q, map_k)`` gives each its own.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class FeatureMap(ABC):
    """A pointwise-in-time map from queries or keys to features."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Map ``(..., D)`` to ``(..., features)``."""

    @abstractmethod
    def num_features(self, head_dim: int) -> int:
        """Width of the features for inputs of width ``head_dim``."""


@dataclass(frozen=True)
class Relu(FeatureMap):
    """``max(x, 0)``."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def num_features(self, head_dim: int) -> int:
        return head_dim


@dataclass(frozen=True)
class EluPlusOne(FeatureMap):
    """``elu(x) + 1``: strictly positive (Katharopoulos et al., 2020)."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1  # not in place: code generated for that was wrong (docs/notes.md)

    def num_features(self, head_dim: int) -> int:
        return head_dim


@dataclass(frozen=True)
class SoftmaxPair(FeatureMap):
    """``[softmax(x), softmax(-x)]`` over channels: bounded, positive, keeps both signs (Hedgehog)."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1)

    def num_features(self, head_dim: int) -> int:
        return 2 * head_dim


@dataclass(frozen=True)
class TaylorExp(FeatureMap):
    """Features whose inner product is ``1 + s + s^2/2`` with ``s = q.k / sqrt(D)``: exp to second order.

    The squares are kept once per unordered pair, ``x_i x_j`` with ``i <= j``: (D+1)(D+2)/2 features.
    """

    def __call__(self, x: Tensor) -> Tensor:
        d = x.shape[-1]
        x = x * d**-0.25
        i, j = torch.triu_indices(d, d, device=x.device)
        # (x.y)^2/2 = sum_i x_i^2 y_i^2 / 2 + sum_{i<j} x_i x_j y_i y_j
        weight = torch.ones(i.shape, dtype=x.dtype, device=x.device).masked_fill(i == j, 0.5**0.5)
        return torch.cat([torch.ones_like(x[..., :1]), x, x[..., i] * x[..., j] * weight], dim=-1)

    def num_features(self, head_dim: int) -> int:
        return (head_dim + 1) * (head_dim + 2) // 2
