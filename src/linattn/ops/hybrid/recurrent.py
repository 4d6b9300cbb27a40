"""Hybrid attention token by token: the form of decoding, in a time that does not depend on the past.

At position p, with a ring of the latest R tokens:

    1. if a chunk's choice is due, its best tokens are marked; beyond the cap, the worst of all lose their mark
    2. the token at p - R leaves the ring: if it is marked, into a free slot of the cache, otherwise into the sums
    3. the token at p takes its slot
    4. the query reads ring and cache, each entry as an exact or as a linear key, and the sums

A token that lost its mark inside the cache is read as a linear key until its slot is needed; then it is summed up. A
step sums up at most one token, since a token that takes such a slot is not summed up itself.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.hybrid.layout import take
from linattn.ops.hybrid.saliency import best_first, step_score, top_of_chunk
from linattn.ops.hybrid.types import HybridState, HybridSums, SalientBudget, SalientCache, Window, WindowRing
from linattn.ops.shared.types import LinearState

FIRST_SLOTS = 8


class Token(NamedTuple):
    """One token of each sequence, with query heads grouped by the key head they share."""

    q: Tensor  # (B, H_kv, G, K), scaled
    k: Tensor  # (B, H_kv, K)
    v: Tensor  # (B, H_kv, V)
    query_features: Tensor  # (B, H_kv, G, F)
    features: Tensor  # (B, H_kv, F)
    score: Tensor | None = None  # (B, H_kv); None with a budget: how much the token attends to itself
    salient: Tensor | None = None  # (B, H_kv) bool: chosen by name
    real: Tensor | None = None  # (B,) bool: a sequence whose token is not real stays as it is


def hybrid_step(
    token: Token, state: HybridState, window: Window, budget: SalientBudget | None
) -> tuple[HybridSums, HybridState]:
    """The sums ``(B, H_kv, G, .)`` of one query, and the next state."""
    ring, cache, p = state.window, state.salient, state.length
    H_kv, R = ring.k.shape[1], ring.k.shape[2]
    real = torch.ones_like(p, dtype=torch.bool) if token.real is None else token.real
    score = token.score
    if budget is not None and score is None:
        with torch.no_grad():
            score = step_score(token.q, token.k, ring.k.to(token.k), p, budget)
    if budget is not None and cache is not None:
        ring, cache = _mark(ring, cache, p, real, window, budget)
    slot = p.remainder(R)[:, None, None].expand(-1, H_kv, 1)
    leaving = (real & (p >= R))[:, None]  # (B, 1)
    oldest = WindowRing(*(take(x, slot).squeeze(2) for x in ring))
    summed, values = oldest.features * leaving.unsqueeze(-1), oldest.v
    if cache is not None:
        stays = oldest.salient & leaving  # (B, H_kv)
        cache = cache if budget is not None and budget.cap is not None else _with_room(cache, stays)
        if cache.k.shape[2]:
            cache, lost = _place(cache, oldest, stays, p - R)
            freed = torch.zeros_like(summed) if lost is None else lost.features * (lost.position >= 0).unsqueeze(-1)
            summed = torch.where(stays.unsqueeze(-1), freed.to(summed), summed)
            values = values if lost is None else torch.where(stays.unsqueeze(-1), lost.v, values)
    kv = state.linear.kv + summed.to(state.linear.kv).unsqueeze(-1) * values.to(state.linear.kv).unsqueeze(-2)
    linear = LinearState(kv, state.linear.k + summed.to(kv))
    marked = torch.zeros_like(oldest.salient) if token.salient is None else token.salient
    score = torch.zeros_like(oldest.scores) if score is None else score
    ring = _write(ring, slot, WindowRing(token.k, token.v, token.features, score, marked), oldest, real)
    sums = _read(token, ring, cache, linear, p, window)
    return sums, HybridState(p + real, ring, cache, linear)


def _mark(
    ring: WindowRing, cache: SalientCache, p: Tensor, real: Tensor, window: Window, budget: SalientBudget
) -> tuple[WindowRing, SalientCache]:
    L, H_kv, R = budget.chunk, ring.k.shape[1], ring.k.shape[2]
    first = p - (1 + window.wait) * L
    due = real & (p.remainder(L) == 0) & (first >= 0)
    position = first[:, None] + torch.arange(L, device=p.device)  # (B, L)
    slots = position.remainder(R)[:, None].expand(-1, H_kv, -1)
    best = top_of_chunk(ring.scores.gather(2, slots), position[:, None], budget) & due[:, None, None]
    marked = ring.salient.scatter(2, slots, ring.salient.gather(2, slots) | best)
    if budget.cap is None:
        return ring._replace(salient=marked), cache
    last = p[:, None] - 1
    held = (last - (last - torch.arange(R, device=p.device)).remainder(R))[:, None].expand(-1, H_kv, -1)
    alive = torch.cat([cache.alive, marked], 2)
    order = best_first(torch.cat([cache.scores, ring.scores], 2), torch.cat([cache.position, held], 2), alive, budget)
    alive = alive & (order.argsort(-1) < budget.cap)
    M = cache.alive.shape[2]
    return ring._replace(salient=alive[..., M:]), cache._replace(alive=alive[..., :M])


def _with_room(cache: SalientCache, stays: Tensor) -> SalientCache:
    """The cache with a free slot: without a cap it grows when it is full. To know that, the host waits for a GPU."""
    if not bool((stays & cache.alive.all(-1)).any()):
        return cache
    more = max(FIRST_SLOTS, cache.k.shape[2])
    k, v, features = (F.pad(x, (0, 0, 0, more)) for x in cache[:3])
    scores, alive = F.pad(cache.scores, (0, more)), F.pad(cache.alive, (0, more))
    return SalientCache(k, v, features, scores, F.pad(cache.position, (0, more), value=-1), alive)


def _place(
    cache: SalientCache, entry: WindowRing, stays: Tensor, position: Tensor
) -> tuple[SalientCache, SalientCache | None]:
    """The cache with the entry in its first free slot where ``stays``, and what was in that slot.

    With a cap there always is a free slot: ring and cache together have no more marked tokens than slots.
    """
    slot = cache.alive.to(torch.uint8).argmin(-1, keepdim=True)  # (B, H_kv, 1)
    old = SalientCache(*(take(x, slot).squeeze(2) for x in cache))
    features = entry.features if cache.features.shape[3] else old.features  # of width 0: nothing leaves this cache
    new = (entry.k, entry.v, features, entry.scores, position[:, None].expand_as(stays), torch.ones_like(stays))
    written = (_put(x, slot, a, b, stays) for x, a, b in zip(cache, new, old, strict=True))
    return SalientCache(*written), old if cache.features.shape[3] else None


def _write(ring: WindowRing, slot: Tensor, new: WindowRing, old: WindowRing, real: Tensor) -> WindowRing:
    where = real[:, None].expand(-1, ring.k.shape[1])
    return WindowRing(*(_put(x, slot, a, b, where) for x, a, b in zip(ring, new, old, strict=True)))


def _put(x: Tensor, slot: Tensor, new: Tensor, old: Tensor, where: Tensor) -> Tensor:
    """``x (B, H_kv, N, ...)`` with ``new (B, H_kv, ...)`` in its slot if ``where``, and ``old`` otherwise."""
    if x.ndim == 3:
        return x.scatter(2, slot, torch.where(where, new.to(x.dtype), old).unsqueeze(2))
    entry = torch.where(where.unsqueeze(-1), new.to(x.dtype), old).unsqueeze(2)
    return x.scatter(2, slot.unsqueeze(-1).expand_as(entry), entry)


def _read(
    token: Token, ring: WindowRing, cache: SalientCache | None, sums: LinearState, p: Tensor, window: Window
) -> HybridSums:
    q, phi = token.q, token.query_features
    R = ring.k.shape[2]
    position = p[:, None] - (p[:, None] - torch.arange(R, device=p.device)).remainder(R)  # (B, R)
    seen = (position >= 0)[:, None]
    exact = seen & (window.covers(p[:, None], position)[:, None] | ring.salient)
    keys, values, marks = ring.k.to(q), ring.v.to(q), exact
    others = (phi @ ring.features.to(q).mT) * (seen & ~exact).unsqueeze(2)
    linear, linear_total = phi @ sums.kv + others @ values, phi @ sums.k.unsqueeze(-1)
    linear_total = linear_total.squeeze(-1) + others.sum(-1)
    if cache is not None and cache.k.shape[2]:
        if cache.features.shape[3]:
            lost = (cache.position >= 0) & ~cache.alive
            others = (phi @ cache.features.to(q).mT) * lost.unsqueeze(2)
            linear, linear_total = linear + others @ cache.v.to(q), linear_total + others.sum(-1)
        keys, values = torch.cat([keys, cache.k.to(q)], 2), torch.cat([values, cache.v.to(q)], 2)
        marks = torch.cat([exact, cache.alive], 2)
    logits = (q @ keys.mT).masked_fill(~marks.unsqueeze(2), -torch.inf)
    log_max = logits.amax(-1)
    weights = (logits - torch.where(log_max == -torch.inf, 0.0, log_max).unsqueeze(-1)).exp()
    return HybridSums(weights @ values, weights.sum(-1), log_max, linear, linear_total)
