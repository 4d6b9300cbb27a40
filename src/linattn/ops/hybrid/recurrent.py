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
from torch import Tensor

from linattn.ops.hybrid.call import HybridCall
from linattn.ops.hybrid.rows import held_positions, take, with_slots
from linattn.ops.hybrid.saliency import best_first, of_group, score_of, top_of_chunk
from linattn.ops.hybrid.types import HybridState, HybridSums, SalientBudget, SalientCache, Window, WindowRing
from linattn.ops.shared.call import finite_unit, hide
from linattn.ops.shared.types import LinearState

FIRST_SLOTS = 8


class Token(NamedTuple):
    """One token of each sequence, with query heads grouped by the key head they share."""

    q: Tensor  # (B, H_kv, G, K), scaled
    k: Tensor  # (B, H_kv, K)
    v: Tensor  # (B, H_kv, V)
    query_features: Tensor  # (B, H_kv, G, F)
    features: Tensor  # (B, H_kv, F)
    score: Tensor | None  # (B, H_kv); None with a budget: how much the token attends to itself
    real: Tensor  # (B,) bool: a sequence whose token is not real stays as it is


def hybrid_sums(call: HybridCall, dtype: torch.dtype) -> tuple[HybridSums, HybridState]:
    """The sums of all queries, and the state after the last token."""
    state = _empty_state(call, dtype) if call.initial_state is None else call.initial_state
    (B, H_kv, T, _), (phi, psi), mask, scores = call.k.shape, call.feature_pair, call.key_mask, call.scores
    q, phi = (hide(x, mask).to(dtype).unflatten(1, (H_kv, -1)) for x in (call.q, phi))
    k, v, psi = (hide(x, mask).to(dtype) for x in (call.k, call.v, psi))
    q, real = q * call.logit_scale, torch.ones(B, T, dtype=torch.bool, device=k.device) if mask is None else mask
    if scores is not None:
        scores = scores.masked_fill(~real[:, None], 0).detach().to(dtype)
    outputs = []
    for t in range(T):
        score = None if scores is None else scores[:, :, t]
        token = Token(q[:, :, :, t], k[:, :, t], v[:, :, t], phi[:, :, :, t], psi[:, :, t], score, real[:, t])
        sums, state = _step(token, state, call.spans, call.budget)
        outputs.append(sums)
    if not outputs:
        totals = q.new_zeros(*call.q.shape[:3])
        values = q.new_zeros(*totals.shape, v.shape[3])
        return HybridSums(values, totals, totals, values, totals), state
    return HybridSums(*(torch.stack(x, 3).flatten(1, 2) for x in zip(*outputs, strict=True))), state


def _empty_state(call: HybridCall, dtype: torch.dtype) -> HybridState:
    """The state before the first token. Its cache has as many slots as the cap of the budget, or none yet."""
    (B, H_kv), budget, psi = call.k.shape[:2], call.budget, call.feature_pair[1]

    def slots(count: int, features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v, psi = (x.new_zeros(B, H_kv, count, x.shape[3]) for x in (call.k, call.v, features))
        return k, v, psi, torch.zeros(B, H_kv, count, dtype=dtype, device=call.k.device)

    ring, cache = slots(call.ring_size, psi), None
    if budget is not None:
        empty = slots(budget.cap or 0, psi[..., :0] if budget.cap is None else psi)
        position = torch.full_like(empty[3], -1, dtype=torch.int64)
        cache = SalientCache(*empty, position, torch.zeros_like(position, dtype=torch.bool))
    window = WindowRing(*ring, torch.zeros_like(ring[3], dtype=torch.bool))
    length = torch.zeros(B, dtype=torch.int64, device=call.k.device)
    return HybridState(length, window, cache, call.initial_sums(dtype))


def _step(
    token: Token, state: HybridState, window: Window, budget: SalientBudget | None
) -> tuple[HybridSums, HybridState]:
    """The sums ``(B, H_kv, G, .)`` of one query, and the next state."""
    ring, cache, p = state.window, state.salient, state.length
    (_, H_kv, R, _), real, score = ring.k.shape, token.real, token.score
    if score is None:
        score = torch.zeros_like(ring.scores[:, :, 0]) if budget is None else _score(token, ring.k, p, budget)
    if budget is not None and cache is not None:
        ring, cache = _mark(ring, cache, p, real, window, budget)
    slot = p.remainder(R)[:, None, None].expand(-1, H_kv, 1)
    leaving = (real & (p >= R))[:, None]  # (B, 1)
    oldest = WindowRing(*(take(x, slot).squeeze(2) for x in ring))
    summed, values = oldest.features * leaving.unsqueeze(-1), oldest.v
    if budget is not None and cache is not None:
        stays = oldest.salient & leaving  # (B, H_kv)
        cache = _with_room(cache, stays) if budget.cap is None else cache
        if cache.k.shape[2]:
            cache, lost = _place(cache, oldest, stays, p - R)
            freed = torch.zeros_like(summed) if lost is None else lost.features * (lost.position >= 0).unsqueeze(-1)
            summed = torch.where(stays.unsqueeze(-1), freed.to(summed), summed)
            values = values if lost is None else torch.where(stays.unsqueeze(-1), lost.v, values)
    kv = state.linear.kv + summed.to(state.linear.kv).unsqueeze(-1) * values.to(state.linear.kv).unsqueeze(-2)
    linear = LinearState(kv, state.linear.k + summed.to(kv))
    new = WindowRing(token.k, token.v, token.features, score, torch.zeros_like(oldest.salient))
    where = real[:, None].expand(-1, H_kv)
    ring = WindowRing(*(_put(x, slot, a, b, where) for x, a, b in zip(ring, new, oldest, strict=True)))
    return _read(token, ring, cache, linear, p, window), HybridState(p + real, ring, cache, linear)


@torch.no_grad()
def _score(token: Token, held: Tensor, length: Tensor, budget: SalientBudget) -> Tensor:
    """How much a token attends to itself, given the keys of the ring."""
    q, k, held = token.q, token.k, held.to(token.k)
    position = length[:, None] - torch.arange(1, budget.chunk, device=k.device)  # (B, W - 1)
    slot = position.remainder(held.shape[2])[:, None].expand(-1, k.shape[1], -1)
    before = (q @ take(held, slot).mT).masked_fill((position < 0)[:, None, None], -torch.inf)
    itself = (q * k.unsqueeze(2)).sum(-1)
    return of_group(score_of(itself, before, budget.score), budget.reduce, 2)


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
    held = held_positions(p, R)[:, None].expand(-1, H_kv, -1)
    alive = torch.cat([cache.alive, marked], 2)
    order = best_first(torch.cat([cache.scores, ring.scores], 2), torch.cat([cache.position, held], 2), alive, budget)
    alive = alive & (order.argsort(-1) < budget.cap)
    M = cache.alive.shape[2]
    return ring._replace(salient=alive[..., M:]), cache._replace(alive=alive[..., :M])


def _with_room(cache: SalientCache, stays: Tensor) -> SalientCache:
    """The cache with a free slot: without a cap it grows when it is full. To know that, the host waits for a GPU."""
    full = bool((stays & cache.alive.all(-1)).any())
    return with_slots(cache, max(FIRST_SLOTS, cache.k.shape[2])) if full else cache


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
    position = held_positions(p + 1, ring.k.shape[2])
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
    weights = (logits - finite_unit(log_max).unsqueeze(-1)).exp()
    return HybridSums(weights @ values, weights.sum(-1), log_max, linear, linear_total)
