"""Polarity: the positive and the negative parts of queries and keys, in two flows (PolaFormer)."""

from abc import abstractmethod
from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mechanisms.base import Call, CommonOptions, MechanismOutput, check_length
from linattn.mechanisms.common.over_tokens import MEAN_EPS, mean_eps
from linattn.mechanisms.common.wide import WideLinear


def split_signs(x: Tensor) -> Tensor:
    """``[relu(x), relu(-x)]``: ``(..., D) -> (..., 2D)``."""
    return torch.cat([F.relu(x), F.relu(-x)], dim=-1)


def swap_halves(x: Tensor) -> Tensor:
    """``[a, b] -> [b, a]`` on the last axis."""
    return x.roll(x.shape[-1] // 2, dims=-1)


class Flows(NamedTuple):
    """Features of the same-signed and the opposite-signed flow, ``(B, H or H_kv, T, 2D)``; q and k may share one."""

    q_same: Tensor
    q_opposite: Tensor
    k_same: Tensor
    k_opposite: Tensor


class TwoFlows(WideLinear):
    """Two linear attentions, each on one half of V's channels, as one call of the algebra.

    A flow is a virtual head: 2H of them, with ``2D`` features and values of ``D/2`` channels.
    """

    def __init__(self, num_heads: int, head_dim: int, **common: Unpack[CommonOptions]) -> None:
        super().__init__(num_heads, head_dim, **common)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, each flow takes one half of v, got {head_dim}")

    @abstractmethod
    def flows(self, q: Tensor, k: Tensor) -> Flows:
        """Features of both flows, in fp32 or fp64."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        heads = (self.num_kv_heads, 2, self.num_heads // self.num_kv_heads)  # a flow's query heads share its keys
        flows = self.flows(q, k)
        queries = torch.stack([x.unflatten(1, heads[::2]) for x in flows[:2]], dim=2).flatten(1, 3)
        keys = torch.stack(flows[2:], dim=2).flatten(1, 2)
        values = v.unflatten(-1, (2, -1)).movedim(-2, 2).flatten(1, 2)
        queries, eps = (queries, MEAN_EPS) if self.causal else mean_eps(queries, k.shape[2], call)
        out = self.linear(call, {"q": queries, "k": keys, "v": values, "eps": eps})
        output = out.output.unflatten(1, heads).movedim(2, -2).flatten(-2).flatten(1, 2)
        return MechanismOutput(output, out.state)

    @property
    def num_features(self) -> int:
        return 2 * self.head_dim

    def state_size(self, length: int) -> int:
        check_length(length)
        return self.num_kv_heads * self.num_features * (self.head_dim + 2)

    def flops(self, length: int) -> int:
        """As a plain linear attention with 2D features, but for a denominator in each flow."""
        check_length(length)
        return length * (self.num_heads + self.num_kv_heads) * 2 * self.num_features * (self.head_dim + 2)
