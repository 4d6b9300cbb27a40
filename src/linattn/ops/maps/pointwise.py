"""Maps of single channels or whole vectors with few or no parameters, and the Taylor features of the exponential."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.maps.base import FeatureMap, Twin, WideMap


@dataclass(frozen=True)
class Relu(FeatureMap):
    """``max(x, 0)``."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def num_features(self, head_dim: int) -> int:
        return head_dim

    def twin(self) -> Twin:
        return Twin("relu", 1)


@dataclass(frozen=True)
class EluPlusOne(FeatureMap):
    """``elu(x) + 1``: strictly positive (Katharopoulos et al., 2020)."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1  # not in place: the code generated for in-place addition was wrong (docs/notes.md)

    def num_features(self, head_dim: int) -> int:
        return head_dim

    def twin(self) -> Twin:
        return Twin("elu", 1)


@dataclass(frozen=True)
class SoftmaxPair(FeatureMap):
    """``[softmax(x), softmax(-x)]`` over channels: bounded and positive features that keep both signs (Hedgehog)."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1)

    def num_features(self, head_dim: int) -> int:
        return 2 * head_dim

    def twin(self) -> Twin:
        return Twin("softmax_pair", 2)


@dataclass(frozen=True)
class UnitSilu(WideMap):
    """``(silu(x) + 1/2) / |silu(x) + 1/2|`` over channels: positive and of length 1 (LION)."""

    @property
    def steep(self) -> bool:
        return False

    def wide(self, x: Tensor) -> Tensor:
        shifted = F.silu(x) + 0.5
        return shifted / shifted.square().sum(-1, keepdim=True).sqrt()  # at least 0.22 sqrt(D)

    def num_features(self, head_dim: int) -> int:
        return head_dim

    def twin(self) -> Twin:
        return Twin("unit_silu", 1)


@dataclass(frozen=True, eq=False)
class Squares(WideMap):
    """``[square x^2, linear x, constant]``, or without the linear features if ``linear`` is None.

    square, linear and constant are tensors ``()``; ``head_dim`` is the width of x.
    """

    square: Tensor
    linear: Tensor | None
    constant: Tensor
    head_dim: int

    def wide(self, x: Tensor) -> Tensor:
        parts = [x.square() * self.square]
        if self.linear is not None:
            parts.append(x * self.linear)
        return torch.cat([*parts, torch.ones_like(x[..., :1]) * self.constant], dim=-1)

    def num_features(self, head_dim: int) -> int:
        return head_dim * (1 if self.linear is None else 2) + 1

    def twin(self) -> Twin:
        name, parts = ("squares", 1) if self.linear is None else ("squares_and_linear", 2)
        numbers = [self.square, torch.zeros_like(self.square) if self.linear is None else self.linear]
        table = torch.stack(numbers).float()[None, None, :, None].expand(1, 1, 2, parts * self.head_dim)
        return Twin(name, parts, table=table, constant=self.constant.float())


@dataclass(frozen=True)
class TaylorExp(FeatureMap):
    """Features whose inner product is ``1 + s + s^2/2`` with ``s = q.k / sqrt(D)``: the exponential to second order.

    Each product ``x_i x_j`` is kept once, with ``i <= j``: (D+1)(D+2)/2 features in all.
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
