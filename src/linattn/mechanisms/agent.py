"""Agent attention: softmax attention in two steps, through a few pooled queries."""

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from linattn.mechanisms.base import Call, CommonOptions, LinearBase, MechanismOutput, check_length
from linattn.mechanisms.common.linear import wide
from linattn.mechanisms.common.tokens import plane_of, query_mask, softmax_features, token_positions
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.linear.api import linear_attention_with_state
from linattn.ops.shared.call import check_integer, hide, num_sequences, without_autocast
from linattn.ops.shared.packing import sequence_of_tokens
from linattn.ops.shared.types import LinearState


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
        check_integer("num_agents", num_agents)
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

    def flops(self, length: int) -> int:
        """Counts the pooling, the scores of queries and of keys, and values summed by agents and then by queries."""
        check_length(length)
        return length * self.num_heads * self.num_agents * (6 * self.head_dim + 4 * (self.head_dim + 1))


def line_bins(x: Tensor, bins: int, mask: Tensor | None, call: Call) -> Tensor:
    """Membership ``(B, T, bins)`` bool of the tokens of ``x (B, H, T, D)`` in bins over its sequence's real tokens."""
    T = x.shape[2]
    start = torch.zeros(num_sequences(x, call.cu_seqlens), dtype=torch.long, device=x.device)
    positions, lengths = token_positions(T, mask, call.cu_seqlens, start)
    own = lengths[:, None] if call.cu_seqlens is None else lengths[sequence_of_tokens(call.cu_seqlens, T)][None]
    return _in_bins(positions, own, bins)


def plane_bins(x: Tensor, side: int, call: Call) -> Tensor:
    """Membership ``(B, T, side^2)`` bool in ``side x side`` bins of the plane ``call.spatial_shape``, row by row."""
    rows, columns, _ = plane_of(x, call)
    # Positions count padding too, since it has its place in the plane.
    start = torch.zeros(num_sequences(x, call.cu_seqlens), dtype=torch.long, device=x.device)
    positions, _ = token_positions(x.shape[2], None, call.cu_seqlens, start)
    row, column = positions // columns, positions % columns
    vertical = _in_bins(row, torch.full_like(row, rows), side)
    horizontal = _in_bins(column, torch.full_like(column, columns), side)
    return (vertical.unsqueeze(-1) & horizontal.unsqueeze(-2)).flatten(-2)


def pool(x: Tensor, members: Tensor, mask: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """Means of ``x (B, H, T, D)`` over bins, given the tokens' membership ``(B, T, F)``.

    Returns the means ``(N, H, F, D)``, and for each token whether its sequence has any token in a bin,
    ``(B, 1 or H, 1 or T, F)``.
    """
    features = hide(members.to(x.dtype).unsqueeze(1), mask)
    if call.cu_seqlens is None:
        counts = features.sum(2).unsqueeze(-1)  # (B, 1, F, 1)
        return features.mT @ x / counts.clamp(min=1), (counts > 0).mT
    features = features.expand(-1, x.shape[1], -1, -1)
    state = linear_attention_with_state(
        features, features, x, normalizer=None, cu_seqlens=call.cu_seqlens, impl=call.impl
    ).state
    own = sequence_of_tokens(call.cu_seqlens, x.shape[2])
    return state.kv / state.k.clamp(min=1).unsqueeze(-1), (state.k > 0).transpose(0, 1)[:, own].unsqueeze(0)


def read(x: Tensor, memory: Tensor, call: Call) -> Tensor:
    """``x (B, H, T, D)`` times the matrix of its sequence, ``memory (N, H, D, F)``: ``(B, H, T, F)``."""
    if call.cu_seqlens is None:
        return x @ memory
    # As a linear attention with keys of 0, which only reads the state it starts from.
    nothing = x.new_zeros(*x.shape[:3], memory.shape[3])
    start = LinearState(memory, memory.new_zeros(memory.shape[:3]))
    return linear_attention_with_state(
        x, torch.zeros_like(x), nothing, normalizer=None, cu_seqlens=call.cu_seqlens, impl=call.impl,
        initial_state=start,
    ).output  # fmt: skip


def _in_bins(position: Tensor, length: Tensor, bins: int) -> Tensor:
    """Bin b of adaptive pooling holds the positions from ``floor(b L / bins)`` to below ``ceil((b + 1) L / bins)``."""
    b = torch.arange(bins, device=position.device)
    position, length = position.unsqueeze(-1), length.unsqueeze(-1)
    return (position >= b * length // bins) & (position < ((b + 1) * length + bins - 1) // bins)
