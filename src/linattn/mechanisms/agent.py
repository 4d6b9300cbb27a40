"""Agent attention: softmax attention in two steps, through a few pooled queries."""

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from linattn.mechanisms.base import Call, CommonOptions, LinearBase, MechanismOutput, check_length
from linattn.mechanisms.common.over_tokens import query_mask, softmax_features
from linattn.mechanisms.common.pooling import line_bins, plane_bins, pool, read
from linattn.mechanisms.common.wide import wide
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.shared.call import hide, without_autocast


@register_mechanism("agent", paper="arXiv:2312.08874", year=2023, causal=False, state="none")
class Agent(LinearBase):
    """Softmax attention through a few agents: the agents attend to the keys, and the queries to the agents.

    ``o_t = sum_a softmax_a(q_t.A_a / sqrt(D)) sum_s softmax_s(A_a.k_s / sqrt(D)) v_s``

    The agents A are means of queries: over bins of the image plane when ``spatial_shape`` is given (num_agents must
    be a square then), else over bins of the sequence. The bins are those of adaptive pooling and hold real tokens only.
    They need the whole sequence, so there is no recurrent form. q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``,
    output ``(B, H, T, D)``; every query head has its own agents. The paper's position biases are left out; its
    convolution belongs to the layer.

    Paper: Han et al., Agent Attention: On the Integration of Softmax and Linear Attention.

    Args:
        num_agents: number of agents per head: bins of the pooling.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("agent", num_heads=2, head_dim=8, num_agents=4)
        >>> q, k, v = torch.randn(3, 1, 2, 15, 8).unbind()
        >>> mechanism(q, k, v, spatial_shape=(3, 5)).shape
        torch.Size([1, 2, 15, 8])
    """

    rotates: ClassVar[None] = None  # the features are agents, not channels

    def __init__(self, num_heads: int, head_dim: int, *, num_agents: int = 49, **common: Unpack[CommonOptions]) -> None:
        super().__init__(num_heads, head_dim, **common)
        if not isinstance(num_agents, int) or isinstance(num_agents, bool) or num_agents < 1:
            raise ValueError(f"num_agents must be an integer >= 1, got {num_agents!r}")
        self.num_agents = num_agents

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        mask = query_mask(q, k, call)
        group = self.num_heads // self.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
        with without_autocast(q):  # what follows are exponents
            queries, keys = hide(wide(q), mask), wide(k)
            agents, present = pool(queries, self._bins(q, mask, call), mask, call)
            memory = agents.mT * self.head_dim**-0.5
            to_agents = read(queries, memory, call).masked_fill(~present, -torch.inf)
            phi, psi = softmax_features(to_agents, read(keys, memory, call), call)
        # The row sums are at least 1: eps only serves queries that see no key.
        return self.linear(call, {"q": phi.to(q.dtype), "k": psi.to(k.dtype), "v": v, "eps": 1e-12})

    def _bins(self, q: Tensor, mask: Tensor | None, call: Call) -> Tensor:
        """Which bins a query is in: ``(B or 1, T, num_agents)`` bool."""
        if call.spatial_shape is None:
            return line_bins(q, self.num_agents, mask, call)
        side = math.isqrt(self.num_agents)
        if side**2 != self.num_agents:
            raise ValueError(f"spatial_shape needs num_agents to be a square, got {self.num_agents}")
        return plane_bins(q, side, call)

    @property
    def num_features(self) -> int:
        return self.num_agents

    def state_size(self, length: int) -> int:
        check_length(length)
        return 0

    def flops(self, length: int) -> int:
        """Counts the pooling, the scores of queries and of keys, and values summed by agents and then by queries."""
        check_length(length)
        return length * self.num_heads * self.num_agents * (6 * self.head_dim + 4 * (self.head_dim + 1))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_agents={self.num_agents}"
