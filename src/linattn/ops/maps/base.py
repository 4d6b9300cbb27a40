"""What a feature map is, in PyTorch and inside a kernel."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.shared.packing import compute_dtype


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

    @property
    def flows(self) -> int:
        return 1

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Map ``(B, H, T, D)`` to ``(B, H flows, T, features)``; flow f of head h stands at ``h flows + f``."""

    @abstractmethod
    def num_features(self, head_dim: int) -> int:
        """Width of the features for inputs of width ``head_dim``."""

    def twin(self) -> Twin | None:
        """How kernels run the map themselves; None: they cannot, and take its features instead."""
        return None


class WideMap(FeatureMap):
    """Feature map that is computed in fp32 or fp64 and then rounded to the dtype of its input.

    Powers and exponentials leave the range of fp16. The features of such a *steep* map stay fp32 for fp16 inputs.
    """

    @property
    def steep(self) -> bool:
        return True

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
    def flows(self) -> int:
        return self.map.flows

    @property
    def steep(self) -> bool:
        return self.map.steep

    def wide(self, x: Tensor) -> Tensor:
        return self.map.wide(x) * self.token.to(x.dtype).unsqueeze(-1)

    def num_features(self, head_dim: int) -> int:
        return self.map.num_features(head_dim)

    def twin(self) -> Twin | None:
        own = self.map.twin()
        if own is None or own.token is not None:
            return None
        return own._replace(token=self.token.float())


def rows(a: Tensor, b: Tensor) -> Tensor:
    """Table of a twin ``(.., heads, 2, F)`` in fp32, from its two rows ``(.., heads, F)``."""
    return torch.stack([a, b], dim=-2).float()


def with_groups(x: Tensor, heads: int) -> Tensor:
    """``(B, H, T, D) -> (B, heads, H / heads, T, D)``: heads by group, to broadcast what each group shares."""
    return x.unflatten(1, (heads, -1))
