"""One token of hybrid attention in the layout of decoding: few operations, and the work of a chunk where it ends."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.hybrid.decoding import (
    ONES,
    DecodingState,
    Marks,
    Setting,
    add_rows,
    count_chosen,
    scored,
    window_start,
)
from linattn.ops.hybrid.rows import take
from linattn.ops.hybrid.saliency import best_first, top_of_chunk
from linattn.ops.hybrid.types import Units

LEAST_ROOM = 64  # slots that a table without a cap grows by
# Next to a linear part of usual size e^-60 is negligible, and e^60 times such a part is finite in fp32.
LEAST_LOGIT = -60.0


class StepPlaces(NamedTuple):
    """Where the tokens of one step lie, which is the same in all layers of a model."""

    ended: tuple[tuple[Tensor | None, int], ...]  # rows (None: all) in which a chunk ended, and their length
    first: int  # the slots from first to before last are read
    last: int
    rows: slice | Tensor  # all, or (B,) with slots and turns where rows differ
    slot: int | Tensor  # of the new token
    turn: int | Tensor  # place of the new token in its chunk
    hidden: Tensor | None  # (B H_kv, 1, last - first): -inf where a row has no token, else 0; None: all have
    leaving: Tensor | bool  # whether the token that was in the slot is added to the sums; (B, 1, 1) if rows differ


def hybrid_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodingState,
    *,
    features: tuple[Tensor, Tensor] | None = None,
    gate: Tensor | None = None,
    units: Units = "row_max",
) -> tuple[Tensor, DecodingState]:
    """Decode one token ``(B, heads, 1, .)`` of each sequence without gradients, in as few operations as possible.

    All tokens must be real. The state, made by :func:`linattn.ops.hybrid.decoding.begin`, is overwritten. Nothing is
    checked: this is the inner loop of models, whose inputs have the same form in every step.

    ``o = (sum p_i v_i + u g * phi . kv) / (1 + u phi . z)``, where ``p`` is the softmax over the exact keys and ``u``
    the value of a linear weight of 1 in units of p: the largest ``p_i``, or with ``units="one"`` the largest ``p_i``
    over ``e^m`` with ``m`` the largest logit. The two sums of each part come from one product.
    """
    (B, H), H_kv, V = q.shape[:2], k.shape[1], v.shape[3]
    phi, psi = (q[..., :0], k[..., :0]) if features is None else features
    q, phi = (x.reshape(B * H_kv, H // H_kv, x.shape[3]) for x in (q, phi))  # the query heads of each key head
    state, logits, values = _write_and_weigh(q, torch.cat([psi, k, v], -1), k.shape[3], state)
    weights = logits.softmax(-1)
    output = torch.bmm(weights, values)
    if phi.shape[2]:
        unit = weights.amax(-1, keepdim=True)
        if units == "one":
            unit = unit / logits.amax(-1, keepdim=True).clamp_(min=LEAST_LOGIT).exp_()
        sums = state.sums.flatten(0, 1)
        phi = phi.to(sums.dtype) * unit
        if gate is None:
            output = torch.baddbmm(output, phi, sums)
        else:
            linear = torch.bmm(phi, sums)
            linear[..., :V].mul_(gate.reshape(B * H_kv, H // H_kv, V).to(sums.dtype))
            output = output.add_(linear)
    return (output[..., :V] / output[..., V : V + 1]).view(B, H, 1, V).to(v.dtype), state


def _write_and_weigh(q: Tensor, row: Tensor, K: int, state: DecodingState) -> tuple[DecodingState, Tensor, Tensor]:
    """Write the token, a row ``(B, H_kv, 1, F + K + V)`` of the table; returns the state, logits ``(B H_kv, G, N)``.

    The third result are values and ones, ``(B H_kv, N, V + ONES)``.
    """
    lengths, setting = state.lengths(), state.setting
    state = _with_room(state, max(count_chosen(n + 1, setting.window, setting.budget) for n in lengths))
    places = _places(lengths, setting, state.table.shape[1], state.cache_size, state.table.device, state.sums.dtype)
    for rows, length in places.ended:
        _end_chunk(state, rows, length)
    _write(q, row, state, places)
    dtype = state.sums.dtype
    read = state.table[:, :, places.first : places.last, state.sums.shape[2] :].flatten(0, 1).to(dtype)
    q = q.to(dtype)
    start, share = (q[:, :1, :1], 0) if places.hidden is None else (places.hidden, 1)
    logits = torch.baddbmm(start, q, read[..., :K].mT, beta=share, alpha=setting.scale)
    return state._replace(steps=state.steps + 1), logits, read[..., K:]


def _write(q: Tensor, row: Tensor, state: DecodingState, places: StepPlaces) -> None:
    table, sums, Fs, at = state.table, state.sums, state.sums.shape[2], (places.rows, slice(None), places.slot)
    if places.leaving is not False:
        old = table[at].to(sums.dtype)
        features = old[..., :Fs] if places.leaving is True else old[..., :Fs] * places.leaving
        sums.addcmul_(features.unsqueeze(-1), old[..., -sums.shape[3] :].unsqueeze(-2))
    table[..., :-ONES][at] = row.squeeze(2)
    if state.marks is not None:
        state.marks.queries[places.rows, :, places.turn] = q.unflatten(0, row.shape[:2])


@lru_cache(maxsize=16)  # for the layers of a model, which may differ in their settings
def _places(
    lengths: tuple[int, ...], setting: Setting, heads: int, M: int, device: torch.device, dtype: torch.dtype
) -> StepPlaces:
    window, budget, W = setting.window, setting.budget, setting.window.size
    chosen = [count_chosen(n + 1, window, budget) for n in lengths]
    held = [n + 1 - window_start(n + 1, window) for n in lengths]
    chunks = window.layout == "chunks"
    slots = [M + h - 1 for h in held] if chunks else [n % W for n in lengths]
    first, last = M - max(chosen), M + max(held)
    same = len(set(lengths)) == 1
    ends = {n for n in lengths if chunks and n and n % W == 0 and (budget is not None or n >= setting.room)}
    ended = tuple(
        (None if same else torch.tensor([row for row, m in enumerate(lengths) if m == n], device=device), n)
        for n in sorted(ends)
    )
    leaving, turns = [not chunks and n >= W for n in lengths], [n % W for n in lengths]
    if same:
        return StepPlaces(ended, first, last, slice(None), slots[0], turns[0], None, leaving[0])
    begins, stops = [M - c for c in chosen], [M + h for h in held]
    numbers = torch.tensor([slots, turns, begins, stops, leaving], device=device)  # one transfer
    hidden = None
    if len(set(begins)) > 1 or len(set(stops)) > 1:
        slot = torch.arange(first, last, device=device)
        empty = (slot < numbers[2, :, None]) | (slot >= numbers[3, :, None])
        hidden = torch.zeros(empty.shape, dtype=dtype, device=device).masked_fill_(empty, -torch.inf)
        hidden = hidden.repeat_interleave(heads, 0).unsqueeze(1)
    leaves = numbers[4, :, None, None].to(dtype) if len(set(leaving)) > 1 else leaving[0]
    rows = torch.arange(len(lengths), device=device)
    return StepPlaces(ended, first, last, rows, numbers[0], numbers[1], hidden, leaves)


def _with_room(state: DecodingState, chosen: int) -> DecodingState:
    """The state with room for ``chosen`` tokens: without a cap the table grows, by at least a part of its size."""
    marks, table, M = state.marks, state.table, state.cache_size
    if chosen <= M or marks is None:
        return state
    more, (B, H_kv) = max(LEAST_ROOM, chosen - M, M // 2), table.shape[:2]
    scores = torch.cat([marks.kept_scores.new_zeros(B, H_kv, more), marks.kept_scores], 2)
    position = torch.cat([marks.kept_position.new_full((B, H_kv, more), -1), marks.kept_position], 2)
    table = torch.cat([table.new_ones(B, H_kv, more, table.shape[3]), table], 2)
    return state._replace(table=table, marks=marks._replace(kept_scores=scores, kept_position=position))


def _end_chunk(state: DecodingState, rows: Tensor | None, length: int) -> None:
    """Do what is due at the end of a chunk, after ``length`` tokens: scores, a choice, summing up the oldest chunk."""
    if rows is not None:
        some = [x.index_select(0, rows) for x in state.written]
        _end_chunk(state.writing_to(some), None, length)
        for x, part in zip(state.written, some, strict=True):
            x.index_copy_(0, rows, part)
        return
    R, L, M, table, marks = state.setting.room, state.setting.window.size, state.cache_size, state.table, state.marks
    if marks is not None:
        marks.scores.copy_(scored(state, length))
    if length < R:
        return
    if marks is not None:
        _choose(state, marks, length)
        marks.scores[..., : R - L] = marks.scores[..., L:].clone()
    else:
        gone = table[:, :, M : M + L]
        state.sums.copy_(add_rows(state.sums, gone, gone.new_ones(1, 1, L), state.sums.shape[2]))
    table[:, :, M : M + R - L] = table[:, :, M + L :].clone()


def _choose(state: DecodingState, marks: Marks, length: int) -> None:
    """Add the best tokens of the oldest chunk to the chosen ones; beyond the cap, sum up the worst of all."""
    window, budget, R = state.setting.window, state.setting.budget, state.setting.room
    assert budget is not None
    table, L, M = state.table, window.size, state.cache_size
    before, after = (count_chosen(n, window, budget) for n in (length, length + 1))
    position = torch.arange(length - R, length - R + L, device=table.device)
    best = top_of_chunk(marks.scores[..., :L], position, budget)
    old, new = slice(M - before, M), slice(M - after, M)
    alive = torch.cat([torch.ones_like(marks.kept_scores[..., old], dtype=torch.bool), best], 2)
    scores = torch.cat([marks.kept_scores[..., old], marks.scores[..., :L]], 2)
    positions = torch.cat([marks.kept_position[..., old], position.expand_as(best)], 2)
    order = best_first(scores, positions, alive, budget)[..., :after]
    entries = table[:, :, M - before : M + L]
    gone = torch.ones_like(alive).scatter_(2, order, False)
    state.sums.copy_(add_rows(state.sums, entries, gone, state.sums.shape[2]))
    table[:, :, new] = take(entries, order)
    marks.kept_scores[..., new], marks.kept_position[..., new] = scores.gather(2, order), positions.gather(2, order)
