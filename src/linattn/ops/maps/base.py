"""What a feature map is, in PyTorch and inside a kernel, and the maps that need no powers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.shared.call import compute_dtype


class Twin(NamedTuple):
    """How a kernel runs a map on the inputs it loads. The parameters are fp32 tensors that autograd may follow."""

    name: str  # which device function, see MAP_CODES
    parts: int  # features per channel, 1 or 2; the features of part p are the columns [p D, (p + 1) D)
    flows: int = 1
    table: Tensor | None = None  # two numbers per feature: (1 or B, flows times (H or H_kv) or 1, 2, parts D)
    token: Tensor | None = None  # a factor per token: (1 or B, 1 or H or H_kv, T)
    constant: Tensor | None = None  # a number (): one more feature, in the last column, the same for all tokens


class FeatureMap(ABC):
    """Map of queries or keys to features, token by token: a frozen value, which may hold tensors.

    A map with two *flows* turns each head into two virtual heads, each with its own features and one half of v's
    channels.
    """

    flows: int = 1
    parts: int = 1  # features per channel
    kernel: str | None = None  # the name of a twin that needs no parameters

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Map ``(B, H, T, D)`` to ``(B, H flows, T, features)``; flow f of head h stands at ``h flows + f``."""

    def num_features(self, head_dim: int) -> int:
        """Width of the features for inputs of width ``head_dim``."""
        return self.parts * head_dim

    def twin(self) -> Twin | None:
        """How kernels run the map themselves; None: they cannot, and take its features instead."""
        return None if self.kernel is None else Twin(self.kernel, self.parts)


class WideMap(FeatureMap):
    """Feature map that is computed in fp32 or fp64 and then rounded to the dtype of its input.

    Powers and exponentials leave the range of fp16. The features of such a *steep* map stay fp32 for fp16 inputs.
    """

    steep: bool = True

    @abstractmethod
    def wide(self, x: Tensor) -> Tensor:
        """The features of an fp32 or fp64 tensor x, in its dtype."""

    def __call__(self, x: Tensor) -> Tensor:
        features = self.wide(x.to(compute_dtype(x)))
        return features if self.steep and x.dtype == torch.float16 else features.to(x.dtype)


@dataclass(frozen=True, eq=False)
class Scaled(WideMap):
    """Another feature map, multiplied by a factor per token ``(1 or B, 1, T)``."""

    map: WideMap
    token: Tensor

    @property
    def flows(self) -> int:  # type: ignore[override]
        return self.map.flows

    @property
    def steep(self) -> bool:  # type: ignore[override]
        return self.map.steep

    def wide(self, x: Tensor) -> Tensor:
        return self.map.wide(x) * self.token.to(x.dtype).unsqueeze(-1)

    def num_features(self, head_dim: int) -> int:
        return self.map.num_features(head_dim)

    def twin(self) -> Twin | None:
        twin = self.map.twin()
        return None if twin is None or twin.token is not None else twin._replace(token=self.token.float())


def rows(a: Tensor, b: Tensor) -> Tensor:
    """Table of a twin ``(.., heads, 2, F)`` in fp32, from its two rows ``(.., heads, F)``."""
    return torch.stack([a, b], dim=-2).float()


def with_groups(x: Tensor, heads: int) -> Tensor:
    """``(B, H, T, D) -> (B, heads, H / heads, T, D)``: heads by group, to broadcast what each group shares."""
    return x.unflatten(1, (heads, -1))


@dataclass(frozen=True)
class Relu(FeatureMap):
    """``max(x, 0)``."""

    kernel = "relu"

    def __call__(self, x: Tensor) -> Tensor:
        return F.relu(x)


@dataclass(frozen=True)
class EluPlusOne(FeatureMap):
    """``elu(x) + 1``: strictly positive (Katharopoulos et al., 2020)."""

    kernel = "elu"

    def __call__(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1  # not in place: the code generated for in-place addition was wrong (docs/notes.md)


@dataclass(frozen=True)
class SoftmaxPair(FeatureMap):
    """``[softmax(x), softmax(-x)]`` over channels: bounded and positive features that keep both signs (Hedgehog)."""

    parts, kernel = 2, "softmax_pair"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1)


@dataclass(frozen=True)
class UnitSilu(WideMap):
    """``(silu(x) + 1/2) / |silu(x) + 1/2|`` over channels: positive and of length 1 (LION)."""

    steep, kernel = False, "unit_silu"

    def wide(self, x: Tensor) -> Tensor:
        shifted = F.silu(x) + 0.5
        return shifted / shifted.square().sum(-1, keepdim=True).sqrt()  # at least 0.22 sqrt(D)


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


@dataclass(frozen=True, eq=False)
class PairRelu(WideMap):
    """ReLU after a 2 x 2 matrix per pair of channels: ``max(own x_c + other x_c', 0)``, c and c' the pair's channels.

    own and other are ``(1 or B, H or H_kv, D)``; the query heads of a group may share them.
    """

    own: Tensor
    other: Tensor

    steep = False

    def wide(self, x: Tensor) -> Tensor:
        x = with_groups(x, self.own.shape[1])
        crossed = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        own, other = (m.to(x.dtype)[:, :, None, None] for m in (self.own, self.other))
        return F.relu(own * x + other * crossed).flatten(1, 2)

    def twin(self) -> Twin:
        return Twin("pair_relu", 1, table=rows(self.own, self.other))
