"""Hybrid attention in linear time: a query meets the chunks its window touches, the chosen tokens, and a sum.

For a query chunk c that begins at position b_c and whose windows reach ``back`` chunks before it:

    near    tokens of chunks c - back .. c: exact in the window or chosen, the rest of them linear, pair by pair
    chosen  tokens of earlier chunks that are exact at b_c: choices begin and end where chunks do
    sum     S_c of psi_i v_i^T over all others, one state per chunk: S_c = S_{c-1} + the tokens that left the near
            chunks without being chosen + the chosen tokens whose time ended at b_c

Several chunks are computed at once, as batched products over blocks of a bounded number of scores.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.hybrid.rows import first_true, take
from linattn.ops.hybrid.types import HybridSums, Rows
from linattn.ops.shared.call import finite_unit
from linattn.ops.shared.types import LinearState

BLOCK_SCORES = 1 << 23  # of all heads and chunks of a block: 32 MB in fp32


class _Chosen(NamedTuple):
    """The N chosen tokens that a block of n chunks may see; masks are per chunk, ``(B, H_kv, n, N)``."""

    k: Tensor  # (B, H_kv, N, K)
    v: Tensor  # (B, H_kv, N, V)
    features: Tensor  # (B, H_kv, N, F)
    visible: Tensor
    ending: Tensor | None  # None: they stay for good


@dataclass(frozen=True)
class _Plan:
    """Rows after zeros, so that every chunk has ``back + 1`` chunks before it."""

    rows: Rows
    back: int
    k: Tensor  # (B, H_kv, (back + 1) L + S, K)
    v: Tensor
    features: Tensor
    real: Tensor  # (B, (back + 1) L + S)
    until: Tensor | None  # (B, H_kv, (back + 1) L + S)
    near: Tensor  # (L, (back + 1) L) bool: whether the key is at or before the query
    covered: Tensor  # (L, (back + 1) L) bool: whether it also is in the query's window

    def borders(self, c0: int, c1: int) -> Tensor:
        """Positions ``(B, n)`` where chunks begin."""
        return self.rows.start[:, None] + torch.arange(c0, c1, device=self.k.device) * self.rows.chunk


def hybrid_sums(rows: Rows) -> HybridSums:
    """The sums of rows that are a whole number of chunks long."""
    B, H, S, _ = rows.q.shape
    L, n = rows.chunk, S // rows.chunk
    plan = _plan(rows)
    width = plan.near.shape[1] + (0 if rows.salient is None else rows.salient.k.shape[2])
    step = max(1, min(n, BLOCK_SCORES // (B * H * L * width)))
    state, parts = rows.initial, []
    for c0 in range(0, n, step):
        sums, state = _block(plan, c0, min(c0 + step, n), state)
        parts.append(sums)
    return HybridSums(*(x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*parts, strict=True)))


def _plan(rows: Rows) -> _Plan:
    L, S = rows.chunk, rows.k.shape[2]
    back = rows.window.chunks_before(L)
    before = (back + 1) * L
    k, v, features = (F.pad(x, (0, 0, before, 0)) for x in (rows.k, rows.v, rows.key_features))
    until = None if rows.salient is None else F.pad(rows.salient.until_of_rows(S), (before, 0))
    t = torch.arange(back * L, before, device=k.device)[:, None]
    i = torch.arange(before, device=k.device)[None, :]
    near = i <= t
    return _Plan(
        rows, back, k, v, features, F.pad(rows.real, (before, 0)), until, near, near & rows.window.covers(t, i)
    )


def _block(plan: _Plan, c0: int, c1: int, state: LinearState) -> tuple[HybridSums, LinearState]:
    rows, L, n = plan.rows, plan.rows.chunk, c1 - c0
    H_kv, before = rows.k.shape[1], plan.near.shape[1]
    # (B, H_kv, n, G, L, .): the heads of a group and the tokens of a chunk are the rows of one product
    q, phi = (
        x[:, :, c0 * L : c1 * L].unflatten(2, (n, L)).unflatten(1, (H_kv, -1)).transpose(2, 3)
        for x in (rows.q, rows.query_features)
    )
    span = slice((c0 + 1) * L, (c1 + plan.back + 1) * L)
    k, v = (x[:, :, span].unfold(2, before, L) for x in (plan.k, plan.v))  # (B, H_kv, n, ., span)
    real = plan.real[:, span].unfold(1, before, L)[:, None, :, None, None]  # (B, 1, n, 1, 1, span)
    exact = plan.covered & real
    if plan.until is not None:
        until = plan.until[:, :, span].unfold(2, before, L)
        exact = exact | (plan.near & real & (until > plan.borders(c0, c1)[:, None, :, None])[:, :, :, None, None])
    logits = _product(q, k).masked_fill(~exact, -torch.inf)
    log_max = logits.amax(-1)
    chosen = _chosen(plan, c0, c1)
    if chosen is not None:
        far = (q.flatten(2, 4) @ chosen.k.mT).unflatten(2, q.shape[2:5])
        far = far.masked_fill(~chosen.visible[:, :, :, None, None], -torch.inf)
        log_max = torch.maximum(log_max, far.amax(-1))
    unit = finite_unit(log_max).unsqueeze(-1)
    weights = (logits - unit).exp()
    total, sums = weights.sum(-1), _product(weights, v.mT)
    if chosen is not None:
        weights = (far - unit).exp()
        more = weights.flatten(2, 4) @ chosen.v
        total, sums = total + weights.sum(-1), sums + more.unflatten(2, q.shape[2:5])
    linear, linear_total, state = _linear(plan, phi, exact, real, v, chosen, c0, c1, state)
    parts = (x.transpose(2, 3).flatten(1, 2).flatten(2, 3) for x in (sums, total, log_max, linear, linear_total))
    return HybridSums(*parts), state


def _linear(
    plan: _Plan, phi: Tensor, exact: Tensor, real: Tensor, v: Tensor, chosen: _Chosen | None, c0: int, c1: int,
    state: LinearState,
) -> tuple[Tensor, Tensor, LinearState]:  # fmt: skip
    """Numerator and denominator of the linear part, and the sums after the block."""
    L, n, before = plan.rows.chunk, c1 - c0, plan.near.shape[1]
    # When chunk c begins, chunk c - back - 1 leaves the near chunks.
    psi, leaving, there = (
        x[:, :, c0 * L : c1 * L].unflatten(2, (n, L)) for x in (plan.features, plan.v, plan.real[:, None])
    )
    if plan.until is not None:
        until = plan.until[:, :, c0 * L : c1 * L].unflatten(2, (n, L))
        there = there & (until <= plan.borders(c0, c1)[:, None, :, None])
    psi = psi * there.unsqueeze(-1)
    kv, z = psi.mT @ leaving, psi.sum(3)  # (B, H_kv, n, F, V), (B, H_kv, n, F)
    if chosen is not None and chosen.ending is not None:
        ended = chosen.features.unsqueeze(2) * chosen.ending.unsqueeze(-1)  # (B, H_kv, n, N, F)
        kv, z = kv + ended.mT @ chosen.v.unsqueeze(2), z + ended.sum(3)
    kv, z = kv.cumsum(2) + state.kv.unsqueeze(2), z.cumsum(2) + state.k.unsqueeze(2)
    sums = _product(phi, kv)
    total = _product(phi, z.unsqueeze(-1)).squeeze(-1)
    if plan.rows.window.layout == "sliding" or plan.rows.window.size == 0:  # whole chunks are exact or far
        span = slice((c0 + 1) * L, (c1 + plan.back + 1) * L)
        features = plan.features[:, :, span].unfold(2, before, L)
        weights = _product(phi, features) * (plan.near & real & ~exact)
        sums, total = sums + _product(weights, v.mT), total + weights.sum(-1)
    return sums, total, LinearState(kv[:, :, -1], z[:, :, -1])


def _chosen(plan: _Plan, c0: int, c1: int) -> _Chosen | None:
    """The chosen tokens that are outside of the near chunks for some chunk of the block."""
    rows, chosen, L = plan.rows, plan.rows.salient, plan.rows.chunk
    if chosen is None:
        return None
    # Later slots are of chunks that stay near until the end of the block.
    N = chosen.head + max(0, c1 - 1 - plan.back) * chosen.per_chunk
    if N == 0:
        return None
    borders = plan.borders(c0, c1)[:, None, :, None]  # (B, 1, n, 1)
    start = rows.start[:, None, None]
    away = (chosen.position[..., :N] - start).div(L, rounding_mode="floor") * L + start + (plan.back + 1) * L
    # Chosen tokens of a state are in no chunk of the rows, so they are never near.
    away = torch.where(torch.arange(N, device=away.device) < chosen.head, -1, away)
    k, v, features, until = (x[:, :, :N] for x in (chosen.k, chosen.v, chosen.features, chosen.until))
    if chosen.cap is not None:
        most = chosen.cap + (c1 - c0) * chosen.per_chunk
        if most < N:  # at one time fewer are exact: those that are when the block begins, or become so later
            index = first_true(until >= borders[:, :, 0], most)
            k, v, features, until, away = (take(x, index) for x in (k, v, features, until, away))
    until, away = until.unsqueeze(2), away.unsqueeze(2)
    ending = None if chosen.cap is None else (until == borders) & (until > away)
    return _Chosen(k, v, features, (away <= borders) & (until > borders), ending)


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """``(B, H_kv, n, [G, L,] K) @ (B, H_kv, n, K, N)``: one matrix product for each chunk."""
    if rows.ndim == matrix.ndim:
        return rows @ matrix
    return (rows.flatten(3, 4) @ matrix).unflatten(3, rows.shape[3:5])
