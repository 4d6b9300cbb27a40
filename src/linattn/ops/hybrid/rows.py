"""Converts a call of hybrid attention to the rows that its forms take, and rows to the state after them."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.hybrid.call import HybridCall
from linattn.ops.hybrid.layout import Places, add, blank, first_true, take, whole_chunks
from linattn.ops.hybrid.saliency import list_from_mask, list_from_scores, window_scores
from linattn.ops.hybrid.types import (
    HybridState,
    Rows,
    SalientBudget,
    SalientCache,
    SalientList,
    Window,
    WindowRing,
)


def build_rows(
    call: HybridCall, dtype: torch.dtype, *, operands: torch.dtype | None = None, chunk: int | None = None
) -> tuple[Rows, Places]:
    """Rows of real tokens without gaps, after those a state remembers, filled up to a whole number of chunks.

    operands: dtype of q, k, v and features, with q not scaled, for kernels, which widen and scale what they read.
    chunk: tokens of a chunk, if the call leaves it open.
    """
    size, kept = chunk or call.chunk, operands or dtype
    state, ring = call.initial_state, None if call.initial_state is None else call.initial_state.window
    before, held = (None, 1) if state is None else (state.length, call.ring_size)
    places = Places(call.k.shape[0], call.k.shape[2], call.key_mask, before, held, size, call.k.device)
    phi, psi = call.feature_pair
    q, phi = (whole_chunks(places.gather(x.to(kept)), size) for x in (call.q, phi))
    k, v, psi = (
        whole_chunks(places.gather(x.to(kept), None if ring is None else ring[i]), size)
        for i, x in enumerate((call.k, call.v, psi))
    )
    real = whole_chunks(places.real[:, None], size)[:, 0]
    initial = call.initial_sums(dtype)
    scaled = q * call.logit_scale if operands is None else q
    rows = Rows(scaled, k, v, phi, psi, places.start, real, size, call.spans, initial)
    if not call.chooses:
        return rows, places
    cache = None if state is None else state.salient
    if cache is not None and cache.features.shape[3] == psi.shape[3]:  # tokens that lost their places before
        initial = add(initial, cache.features.to(dtype), cache.v.to(dtype), ~cache.alive & (cache.position >= 0))
    wide = q.to(dtype) * call.logit_scale if operands is not None and call.scores_itself else scaled
    rows = replace(rows, initial=initial, scores=_scores(call, wide, rows, places, dtype))
    return replace(rows, salient=_choose(call, rows, places)), places


def _scores(call: HybridCall, q: Tensor, rows: Rows, places: Places, dtype: torch.dtype) -> Tensor:
    """Scores ``(B, H_kv, S)``: those of the caller, or how much tokens attend to themselves; and those of a state."""
    state = call.initial_state
    held = None if state is None else state.window.scores
    given = torch.zeros(call.k.shape[:3], dtype=dtype, device=call.k.device)
    if call.budget is not None and call.scores is not None:
        given = call.scores.detach().to(dtype)
    scores = whole_chunks(places.gather(given, held), rows.chunk)
    if call.budget is None or call.scores is not None:
        return scores
    with torch.no_grad():
        budget = call.budget
        itself = window_scores(q, rows.k.to(dtype), rows.real, budget.chunk, budget.score, budget.reduce)
    old = places.is_old()
    return itself if old is None else torch.where(whole_chunks(old[:, None], rows.chunk), scores, itself)


def _choose(call: HybridCall, rows: Rows, places: Places) -> SalientList:
    assert rows.scores is not None
    state = call.initial_state
    ring, cache = (None, None) if state is None else (state.window, state.salient)
    position = rows.position[:, None].expand(rows.scores.shape)
    table = (rows.k, rows.v, rows.key_features, rows.scores, position)
    named = None
    if call.budget is None or ring is not None:
        named = whole_chunks(places.gather(call.salient_mask(), None if ring is None else ring.salient), rows.chunk)
    if call.budget is None:
        assert named is not None
        return list_from_mask(named, table, cache)
    return list_from_scores(table, places, named, call.budget, rows.window, cache)


def empty_state(call: HybridCall, dtype: torch.dtype) -> HybridState:
    """The state before the first token."""
    B, H_kv, R = call.k.shape[0], call.k.shape[1], call.ring_size
    scores = torch.zeros(B, H_kv, R, dtype=dtype, device=call.k.device)
    k, v, psi = (x.new_zeros(B, H_kv, R, x.shape[3]) for x in (call.k, call.v, call.feature_pair[1]))
    ring = WindowRing(k, v, psi, scores, torch.zeros_like(scores, dtype=torch.bool))
    length = torch.zeros(B, dtype=torch.int64, device=call.k.device)
    return HybridState(length, ring, empty_cache(call, dtype) if call.chooses else None, call.initial_sums(dtype))


def empty_cache(call: HybridCall, dtype: torch.dtype) -> SalientCache:
    """A cache with as many slots as the cap of the budget, or with none yet."""
    B, H_kv = call.k.shape[:2]
    cap = None if call.budget is None else call.budget.cap
    psi = call.feature_pair[1]
    M, width = (0, 0) if cap is None else (cap, psi.shape[3])
    scores = torch.zeros(B, H_kv, M, dtype=dtype, device=call.k.device)
    return SalientCache(
        call.k.new_zeros(B, H_kv, M, call.k.shape[3]), call.v.new_zeros(B, H_kv, M, call.v.shape[3]),
        psi.new_zeros(B, H_kv, M, width), scores,
        torch.full_like(scores, -1, dtype=torch.int64), torch.zeros_like(scores, dtype=torch.bool),
    )  # fmt: skip


def count_numbers(
    window: Window, budget: SalientBudget | None, *, heads: int, widths: tuple[int, int, int], length: int
) -> int:
    """How many numbers the state of one sequence of ``length`` tokens holds, marks and positions included.

    It is computed without a state, for tokens that a budget chooses. If only a part of a chunk has left the ring,
    all its chosen tokens are counted as if they had left it too: an upper bound, at most one chunk's choice too high.

    Args:
        heads: number of key heads.
        widths: ``(K, V, F)``, the widths of a key, of a value and of a key's features (0: no linear part).

    Example:
        >>> from linattn.ops.hybrid.types import SalientBudget, Window
        >>> window, still = Window(64, "chunks"), SalientBudget(1 / 16, 64, sinks=4)
        >>> count_numbers(window, still, heads=2, widths=(64, 64, 128), length=4096)
        147665
    """
    K, V, F = widths
    ring = window.ring_size(budget)
    numbers = ring * (K + V + F + 2) + F * (V + 1)  # the ring, with a score and a mark of each token; the sums
    if budget is not None:
        gone = -(-max(0, length - ring) // budget.chunk)
        slots = budget.chosen_of(gone) if budget.cap is None else budget.cap
        kept = 0 if budget.cap is None else F  # tokens that lose their place need features; without a cap none does
        numbers += slots * (K + V + kept + 3)  # with a score, a position and a mark
    return 1 + heads * numbers  # and the length


def final_state(call: HybridCall, rows: Rows, places: Places) -> HybridState:
    """The state after the last token of the rows."""
    R, H_kv, S, end = call.ring_size, rows.k.shape[1], rows.k.shape[2], places.after
    last = end[:, None] - 1
    held = last - (last - torch.arange(R, device=end.device)).remainder(R)  # (B, R): the position in each slot
    empty = (held < 0)[:, None].expand(-1, H_kv, -1)
    index = (held - rows.start[:, None]).clamp(0, S - 1)[:, None].expand(-1, H_kv, -1)

    def ring(x: Tensor) -> Tensor:
        return blank(take(x, index), empty)

    chosen = rows.salient
    scores = rows.k.new_zeros(rows.k.shape[:3]) if rows.scores is None else rows.scores
    until = torch.zeros_like(scores, dtype=torch.int64) if chosen is None else chosen.until_of_rows(S)
    exact = until > last[:, None]
    window = WindowRing(
        ring(rows.k).to(call.k), ring(rows.v).to(call.v), ring(rows.key_features).to(call.feature_pair[1]),
        ring(scores), ring(exact),
    )  # fmt: skip
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
    k, v, features, scores, position = (
        blank(take(x, index), ~alive, -1 if x is chosen.position else 0) for x in table
    )  # fmt: skip
    more = M - index.shape[2]
    k, v, features = (F.pad(x, (0, 0, 0, more)) for x in (k, v, features))
    return SalientCache(
        k.to(call.k), v.to(call.v), features.to(call.feature_pair[1]), F.pad(scores, (0, more)),
        F.pad(position, (0, more), value=-1), F.pad(alive, (0, more)),
    )  # fmt: skip
