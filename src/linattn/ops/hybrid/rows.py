"""Rows of tokens without padding, after those of a state, and the state after them: on the device, without waiting.

A call becomes the rows that forms and kernels take: chunks begin at multiples of their size, and the tokens that a
budget chooses are listed beside the rows, with the time up to which each stays exact.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.hybrid.call import HybridCall
from linattn.ops.hybrid.saliency import best_first, self_saliency, top_of_chunk
from linattn.ops.hybrid.types import (
    FOREVER,
    HybridState,
    Rows,
    SalientBudget,
    SalientCache,
    SalientList,
    WindowRing,
)
from linattn.ops.shared.types import LinearState

MOST_PAIRS = 2**24  # of tokens that are compared at a time


class Places:
    """Rows of real tokens without gaps after the latest R tokens of a state, with chunks at multiples of their size.

    ``start (B,)`` is the position of a row's first place; ``before`` and ``after (B,)`` are the lengths of the sequence
    in real tokens without and with the new ones.
    """

    def __init__(self, call: HybridCall, chunk: int) -> None:
        (B, _, T, _), device, mask = call.k.shape, call.k.device, call.key_mask
        before = None if call.initial_state is None else call.initial_state.length
        zeros = torch.zeros(B, dtype=torch.int64, device=device)
        self.before = zeros if before is None else before
        self.after = self.before + (zeros + T if mask is None else mask.sum(-1))
        self._plain = mask is None and before is None
        if self._plain:
            self.start, self.real = zeros, torch.ones(B, T, dtype=torch.bool, device=device)
            return
        ring, size = (0, T) if before is None else (call.ring_size, T + call.ring_size + chunk)
        self.start = (self.before - ring).clamp(min=0).div(chunk, rounding_mode="floor") * chunk
        position = self.start[:, None] + torch.arange(size, device=device)
        self.real = (position >= self.before[:, None] - ring) & (position >= 0) & (position < self.after[:, None])
        self.old = position < self.before[:, None]
        order = rank = torch.arange(T, device=device).expand(B, -1)
        if mask is not None:
            order, rank = (~mask).to(torch.uint8).argsort(dim=-1, stable=True), (mask.cumsum(-1) - 1).clamp(min=0)
        nth = (position - self.before[:, None]).clamp(0, max(T - 1, 0))
        self._source = torch.where(self.old, position.remainder(max(ring, 1)), ring + order.gather(1, nth))
        self._target = rank + (self.before - self.start)[:, None]
        self._held, self._mask = ring, mask

    def gather(self, new: Tensor, held: Tensor | None = None) -> Tensor:
        """Put ``new (B, H, T, ...)`` into rows ``(B, H, S, ...)`` after ``held (B, H, R, ...)``; 0 where not real."""
        if self._plain:
            return new
        if self._held:
            held = new.new_zeros(*new.shape[:2], self._held, *new.shape[3:]) if held is None else held.to(new)
            new = torch.cat([held, new], 2)
        return blank(take(new, self._source[:, None].expand(-1, new.shape[1], -1)), ~self.real[:, None])

    def back(self, rows: Tensor) -> Tensor:
        """Take the tokens ``(B, H, T, ...)`` back out of rows; 0 at masked tokens."""
        if self._plain:
            return rows
        x = take(rows, self._target[:, None].expand(-1, rows.shape[1], -1))
        return x if self._mask is None else blank(x, ~self._mask[:, None])


def take(x: Tensor, index: Tensor) -> Tensor:
    """``x (B, H, N, ...)`` at ``index (B, H, M)`` of its third axis."""
    if x.ndim == 3:
        return x.gather(2, index)
    return x.gather(2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def blank(x: Tensor, where: Tensor, value: float = 0) -> Tensor:
    """``x (B, H, N, ...)`` with a value in the entries that ``where (B, 1 or H, N)`` marks."""
    return x.masked_fill(where if x.ndim == 3 else where.unsqueeze(-1), value)


def first_true(flags: Tensor, count: int) -> Tensor:
    """Indices of the first ``count`` True entries of the last axis, in order; if there are fewer, False ones follow."""
    return (~flags).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]


def whole_chunks(x: Tensor, chunk: int) -> Tensor:
    """``x (B, H, S, ...)`` with zeros appended up to a multiple of chunk."""
    more = -x.shape[2] % chunk
    if more == 0:  # padding by nothing is a copy
        return x
    return F.pad(x, (0, more) if x.ndim == 3 else (0, 0, 0, more))


def add(state: LinearState, features: Tensor, v: Tensor, where: Tensor) -> LinearState:
    """The sums with the tokens added that ``where (B, H_kv, N)`` marks."""
    features = features * where.unsqueeze(-1)
    return LinearState(state.kv + features.mT @ v, state.k + features.sum(2))


def held_positions(length: Tensor, ring: int) -> Tensor:
    """``(B, R)``: the position of the token in each slot of a ring after ``length (B,)`` tokens, negative: none."""
    last = length[:, None] - 1
    return last - (last - torch.arange(ring, device=length.device)).remainder(ring)


def build_rows(
    call: HybridCall, dtype: torch.dtype, *, operands: torch.dtype | None = None, chunk: int | None = None
) -> tuple[Rows, Places]:
    """Rows of real tokens without gaps, after those a state remembers, filled up to a whole number of chunks.

    operands: dtype of q, k, v and features, with q not scaled, for kernels, which widen and scale what they read.
    chunk: tokens of a chunk, if the call leaves it open.
    """
    size, kept = chunk or call.chunk, operands or dtype
    state, places = call.initial_state, Places(call, size)
    phi, psi = call.feature_pair
    q, phi = (whole_chunks(places.gather(x.to(kept)), size) for x in (call.q, phi))
    k, v, psi = (
        whole_chunks(places.gather(x.to(kept), None if state is None else state.window[i]), size)
        for i, x in enumerate((call.k, call.v, psi))
    )
    real = whole_chunks(places.real[:, None], size)[:, 0]
    initial = call.initial_sums(dtype)
    scaled = q * call.logit_scale if operands is None else q
    rows = Rows(scaled, k, v, phi, psi, places.start, real, size, call.spans, initial)
    if call.budget is None:
        return rows, places
    cache = None if state is None else state.salient
    if cache is not None and cache.features.shape[3] == psi.shape[3]:  # tokens that lost their places before
        initial = add(initial, cache.features.to(dtype), cache.v.to(dtype), ~cache.alive & (cache.position >= 0))
    wide = q.to(dtype) * call.logit_scale if operands is not None and call.scores is None else scaled
    rows = replace(rows, initial=initial, scores=_scores(call, call.budget, wide, rows, places))
    return replace(rows, salient=_list_of_best(call, call.budget, rows, places)), places


def _scores(call: HybridCall, budget: SalientBudget, q: Tensor, rows: Rows, places: Places) -> Tensor:
    """Scores ``(B, H_kv, S)``: those of the caller, or how much tokens attend to themselves; and those of a state."""
    state, dtype = call.initial_state, rows.initial.kv.dtype
    given = rows.k.new_zeros(call.k.shape[:3], dtype=dtype) if call.scores is None else call.scores.detach().to(dtype)
    scores = whole_chunks(places.gather(given, None if state is None else state.window.scores), rows.chunk)
    if call.scores is not None:
        return scores
    itself = self_saliency(q, rows.k.to(dtype), rows.real, budget.chunk, budget.score, budget.reduce)
    return itself if state is None else torch.where(whole_chunks(places.old[:, None], rows.chunk), scores, itself)


def _list_of_best(call: HybridCall, budget: SalientBudget, rows: Rows, places: Places) -> SalientList:
    """The best tokens of each chunk, exact for good, or with a cap until better ones need the room.

    The rows are a whole number of chunks long. Which tokens of a state are chosen, in chunks whose choice was due
    before, the state says.
    """
    assert rows.scores is not None
    state, L, n = call.initial_state, budget.chunk, rows.scores.shape[2] // budget.chunk
    position = rows.position[:, None].expand(rows.scores.shape)
    by_chunk, position_by_chunk = rows.scores.unflatten(2, (n, L)), position.unflatten(2, (n, L))
    # A choice takes effect from the first query whose window may have let go of the chunk.
    border = places.start[:, None] + (torch.arange(n, device=position.device) + 1 + rows.window.wait) * L  # (B, n)
    now = ((border >= places.before[:, None]) & (border < places.after[:, None]))[:, None, :, None]
    chosen = top_of_chunk(by_chunk, position_by_chunk, budget) & now
    if state is not None:
        unchosen = torch.zeros(call.k.shape[:3], dtype=torch.bool, device=position.device)
        held = whole_chunks(places.gather(unchosen, state.window.salient), rows.chunk).unflatten(2, (n, L))
        chosen = chosen | (held & (border < places.before[:, None])[:, None, :, None])
    slots = first_true(chosen, budget.most_per_chunk)  # (B, H_kv, n, most)
    until = torch.where(chosen.gather(3, slots), FOREVER, 0).flatten(2)
    index = (slots + (torch.arange(n, device=slots.device) * L)[:, None]).flatten(2)
    parts = [take(x, index) for x in (rows.k, rows.v, rows.key_features, rows.scores, position)]
    parts.append(until)
    cache = None if state is None else state.salient
    if cache is not None:
        old = list(cache[:5])
        if old[2].shape[3] != parts[2].shape[3]:  # a cache without a cap keeps no features: nothing leaves it
            old[2] = old[2].new_zeros(*old[2].shape[:3], parts[2].shape[3])
        old.append(torch.where(cache.alive, FOREVER, 0))
        parts = [torch.cat([a.to(b), b], 2) for a, b in zip(old, parts, strict=True)]
    head = 0 if cache is None else cache.k.shape[2]
    k, v, features, scores, position, until = parts
    listed = SalientList(k, v, features, scores, position, until, index, head, slots.shape[3], budget.cap)
    # Without a cap nothing ends.
    return replace(listed, steady=True) if budget.cap is None or n == 0 else _with_cap(listed, border, budget)


def _with_cap(chosen: SalientList, border: Tensor, budget: SalientBudget) -> SalientList:
    """After each chunk the best ``cap`` of all stay exact; the others stop where the chunk's choice takes effect.

    A token stops at the chunk that brings the last of ``cap`` better ones. A token that has stopped never comes back,
    so all chunks can be computed together.
    """
    assert budget.cap is not None
    alive, n = chosen.until > 0, border.shape[1]
    rank = best_first(chosen.scores, chosen.position, alive, budget).argsort(-1)
    entries = torch.arange(rank.shape[2], device=rank.device)
    chunk = F.pad(((entries - chosen.head) // max(chosen.per_chunk, 1)).clamp(min=0), (0, 1), value=n)
    crowded = chunk[_comes_last(rank.masked_fill(~alive, rank.shape[2]), budget.cap)]  # n: never
    ends = torch.cat([border, border.new_full((border.shape[0], 1), FOREVER)], 1)[:, None].expand(-1, rank.shape[1], -1)
    until = torch.minimum(chosen.until, ends.gather(2, torch.maximum(chunk[:-1], crowded)))
    return replace(chosen, until=until, steady=budget.sinks > 0)


def _comes_last(rank: Tensor, cap: int) -> Tensor:
    """For each entry of ``rank (..., N)``, the place of the ``cap``-th entry with a lower rank; N if there is none."""
    N = rank.shape[-1]
    rows = max(MOST_PAIRS // max(rank.numel(), 1), 1)
    places = [
        ((rank.unsqueeze(-2) < part.unsqueeze(-1)).cumsum(-1, dtype=torch.int32) < cap).sum(-1)
        for part in rank.split(rows, -1)
    ]
    return torch.cat(places, -1) if N else rank


def final_state(call: HybridCall, rows: Rows, places: Places) -> HybridState:
    """The state after the last token of the rows."""
    R, H_kv, S, end = call.ring_size, rows.k.shape[1], rows.k.shape[2], places.after
    held, last = held_positions(end, R), end[:, None] - 1
    empty = (held < 0)[:, None].expand(-1, H_kv, -1)
    index = (held - rows.start[:, None]).clamp(0, S - 1)[:, None].expand(-1, H_kv, -1)
    chosen = rows.salient
    scores = rows.k.new_zeros(rows.k.shape[:3]) if rows.scores is None else rows.scores
    until = torch.zeros_like(scores, dtype=torch.int64) if chosen is None else chosen.until_of_rows(S)
    exact = until > last[:, None]
    table = (rows.k, rows.v, rows.key_features, scores, exact)
    k, v, psi, *marks = (blank(take(x, index), empty) for x in table)
    window = WindowRing(k.to(call.k), v.to(call.v), psi.to(call.feature_pair[1]), *marks)
    gone = rows.real[:, None] & (rows.position < end[:, None] - R)[:, None] & ~exact
    linear = add(rows.initial, rows.key_features, rows.v, gone)
    if chosen is None:
        return HybridState(end, window, None, linear)
    old = slice(0, chosen.head)
    ended = (chosen.until[..., old] > 0) & (chosen.until[..., old] <= last[:, None])
    linear = add(linear, chosen.features[:, :, old], chosen.v[:, :, old], ended)
    return HybridState(end, window, _cache(call, chosen, end[:, None, None], R), linear)


def _cache(call: HybridCall, chosen: SalientList, end: Tensor, ring: int) -> SalientCache:
    """The cache of chosen tokens that left the ring and are exact; without a cap it has as many slots as needed."""
    keep = (chosen.until >= end) & (chosen.until > 0) & (chosen.position < end - ring)
    cap = None if call.budget is None else call.budget.cap
    M = (int(keep.sum(-1).max()) if keep.numel() else 0) if cap is None else cap
    index = first_true(keep, M)
    alive = keep.gather(2, index)
    features = chosen.features if cap is not None else chosen.features[..., :0]
    table = (chosen.k, chosen.v, features, chosen.scores, chosen.position)
    found = (blank(take(x, index), ~alive, -1 if x is chosen.position else 0) for x in table)
    k, v, features, scores, position = found
    kept = k.to(call.k), v.to(call.v), features.to(call.feature_pair[1])
    return with_slots(SalientCache(*kept, scores, position, alive), M - index.shape[2])


def with_slots(cache: SalientCache, more: int) -> SalientCache:
    """The cache with further slots, which hold nothing."""
    k, v, features = (F.pad(x, (0, 0, 0, more)) for x in cache[:3])
    scores, alive = F.pad(cache.scores, (0, more)), F.pad(cache.alive, (0, more))
    return SalientCache(k, v, features, scores, F.pad(cache.position, (0, more), value=-1), alive)
