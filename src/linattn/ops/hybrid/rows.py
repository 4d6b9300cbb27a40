"""Converts a call of hybrid attention to the rows that its forms take."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.hybrid.call import HybridCall
from linattn.ops.hybrid.layout import Places
from linattn.ops.hybrid.saliency import window_scores
from linattn.ops.hybrid.salient_list import list_from_mask, list_from_scores
from linattn.ops.hybrid.types import Rows, SalientList
from linattn.ops.shared.types import LinearState


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
        own = window_scores(q, rows.k.to(dtype), rows.real, budget.chunk, budget.score, budget.reduce)
    old = places.is_old()
    return own if old is None else torch.where(whole_chunks(old[:, None], rows.chunk), scores, own)


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
