"""Polarity: the positive and the negative parts of queries and keys, in two flows (PolaFormer)."""

from abc import abstractmethod
from typing import Unpack

from torch import Tensor

from linattn.mechanisms.base import Call, CommonOptions, MechanismOutput, check_length
from linattn.mechanisms.common.over_tokens import MEAN_EPS, with_mean_eps
from linattn.mechanisms.common.wide import WideLinear
from linattn.ops.maps import WideMap


class TwoFlows(WideLinear):
    """Base of mechanisms with two flows: two linear attentions, each on one half of v's channels, in one call.

    Each flow of a head is a virtual head, 2H in all, with ``2D`` features and values of ``D/2`` channels.
    """

    def __init__(self, num_heads: int, head_dim: int, **common: Unpack[CommonOptions]) -> None:
        super().__init__(num_heads, head_dim, **common)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, each flow takes one half of v, got {head_dim}")

    @abstractmethod
    def maps(self) -> tuple[WideMap, WideMap]:
        """The feature maps of q and k, with two flows each."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        map_q, map_k = self.maps()
        map_q, eps = (map_q, MEAN_EPS) if self.causal else with_mean_eps(map_q, q, k.shape[2], call)
        return self.linear(call, {"q": q, "k": k, "v": v, "feature_map": (map_q, map_k), "eps": eps})

    @property
    def num_features(self) -> int:
        return 2 * self.head_dim

    def state_size(self, length: int) -> int:
        check_length(length)
        return self.num_kv_heads * self.num_features * (self.head_dim + 2)

    def flops(self, length: int) -> int:
        """Those of a linear attention with 2D features and a denominator in each flow."""
        check_length(length)
        return length * (self.num_heads + self.num_kv_heads) * 2 * self.num_features * (self.head_dim + 2)
