"""A state of hybrid attention laid out for decoding: steps overwrite it, and do a chunk's work where a chunk ends.

The host knows how long every sequence is, so most of what a step reads is a slice, and nothing waits for the device.
The table has the tokens of the window from slot M on, and the chosen tokens before M, the last of them at M - 1:

    [ ... free | chosen tokens, c of them | tokens of the window, n of them | free ]

A token that no query sees exactly any more is added to the sums at once. So no entries of a slice need to be hidden if
all rows are equally long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.hybrid.rows import first_true, held_positions, take
from linattn.ops.hybrid.saliency import of_group, score_of
from linattn.ops.hybrid.types import HybridState, SalientBudget, SalientCache, Window, WindowRing
from linattn.ops.shared.types import LinearState

ONES = 8  # columns of ones beside the values: one product sums values and weights, and rows stay aligned
NEWEST_REAL = "newest_are_real"  # attribute of a mask (B, Tk) whose newest tokens the host knows to be real


@dataclass(frozen=True)
class Lengths:
    """Lengths of rows that the host knows: those of the tensor ``of (B,)``, or of any rows if all are equal."""

    of: Tensor
    values: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """The options of decoding that are the same for all tokens."""

    window: Window
    budget: SalientBudget | None
    scale: float  # of the logits

    @property
    def room(self) -> int:
        """R, the largest number of tokens of the window."""
        return self.window.ring_size(self.budget)


class Marks(NamedTuple):
    """What the choice of a budget looks at."""

    queries: Tensor  # (B, H_kv, L, G, K): queries of the incomplete chunk, with which its tokens are scored
    scores: Tensor  # (B, H_kv, R): scores of the window's tokens, as far as they are known
    kept_scores: Tensor  # (B, H_kv, M)
    kept_position: Tensor  # (B, H_kv, M) int64


class DecodingState(NamedTuple):
    """A :class:`HybridState` laid out for decoding; its rows may be selected, repeated and reordered."""

    setting: Setting
    length: Tensor  # (B,) int64: real tokens when decoding began
    known: Lengths
    steps: int  # steps taken since then
    table: Tensor  # (B, H_kv, M + R, F + K + V + ONES): features, key, value, ones
    sums: Tensor  # (B, H_kv, F, V + ONES)
    marks: Marks | None  # None without a budget

    @property
    def cache_size(self) -> int:
        """M, the number of slots before the window."""
        return self.table.shape[2] - self.setting.room

    @property
    def written(self) -> list[Tensor]:
        """The tensors that steps write to."""
        return [self.table, self.sums, *(self.marks or ())]

    def writing_to(self, tensors: Sequence[Tensor]) -> "DecodingState":
        """The state with others in the place of ``written``."""
        table, sums, *marks = tensors
        return self._replace(table=table, sums=sums, marks=Marks(*marks) if marks else None)

    def lengths(self) -> tuple[int, ...]:
        """The present lengths of all rows."""
        return tuple(n + self.steps for n in self._known().values)

    def here(self) -> "DecodingState":
        """The state with known lengths and tensors that may be written to: outside of inference mode, copies of its."""
        state = self._replace(known=self._known())
        if not self.table.is_inference() or torch.is_inference_mode_enabled():
            return state
        return state.writing_to([x.clone() for x in state.written])

    def _known(self) -> Lengths:
        """The lengths when decoding began. After a selection from rows of different lengths it waits for the device."""
        known = self.known
        if known.of is self.length:
            return known
        if len(set(known.values)) == 1:
            return Lengths(self.length, (known.values[0],) * self.length.shape[0])
        return Lengths(self.length, tuple(self.length.tolist()))

    def serves(self, setting: Setting, k: Tensor) -> bool:
        """Whether this state can go on with tokens like ``k (B, H_kv, 1, K)`` and this setting."""
        table = self.table
        fits = table.dtype == k.dtype and table.device == k.device and table.shape[:2] == k.shape[:2]
        return fits and self.setting == setting


def usable(like: Tensor) -> bool:
    """Whether a step may write and rely on what the host knows: not with gradients, compiled or captured."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not (like.is_cuda and torch.cuda.is_current_stream_capturing())


def serves(window: Window, budget: SalientBudget | None) -> bool:
    """Whether the layout serves these options: tokens leave the window by chunks, or one by one without a choice.

    Tokens are scored among those that the window holds.
    """
    if window.size == 0:
        return False
    return budget is None if window.layout == "sliding" else budget is None or window.delay > 0


def window_start(length: int, window: Window) -> int:
    """The position of the first token in the window of the latest token."""
    if window.layout == "sliding":
        return max(0, length - window.size)
    return max(0, (max(length - 1, 0) // window.size - window.delay) * window.size)


def count_chosen(length: int, window: Window, budget: SalientBudget | None) -> int:
    """How many tokens are chosen after ``length`` tokens, which does not depend on their scores."""
    if budget is None:
        return 0
    L = budget.chunk
    chosen = budget.chosen_of(max(0, max(length - 1, 0) // L - window.wait))
    return chosen if budget.cap is None else min(chosen, budget.cap)


@torch.no_grad()
def begin(state: HybridState, setting: Setting, group: int) -> DecodingState | None:
    """The state laid out for decoding, in its own memory; None if the layout does not serve it. Waits for a GPU once.

    group: number of query heads per key head.
    """
    ring, cache, linear, window, budget = state.window, state.salient, state.linear, setting.window, setting.budget
    B, H_kv, R, K = ring.k.shape
    one_dtype = ring.k.dtype == ring.v.dtype == ring.features.dtype
    if not (serves(window, budget) and one_dtype and setting.room == R and (budget is None) == (cache is None)):
        return None
    lengths, device = tuple(state.length.tolist()), ring.k.device
    held = held_positions(state.length, R)
    starts = torch.tensor([window_start(n, window) for n in lengths], device=device)[:, None]
    over = ((held >= 0) & (held < starts))[:, None].expand(-1, H_kv, -1)  # in the ring but not in the window
    first = starts if window.layout == "chunks" else torch.zeros_like(starts)
    index = (first + torch.arange(R, device=device)).remainder(R)[:, None].expand(-1, H_kv, -1)
    entries = _table(ring.features, ring.k, ring.v)
    table, added, marks = take(entries, index), over, None
    if budget is not None and cache is not None:
        if budget.cap not in (None, cache.k.shape[2]):
            return None
        features = cache.features
        if budget.cap is None:  # then they are not kept, and not needed
            features = features.new_zeros(*features.shape[:3], ring.features.shape[3])
        entries = torch.cat([_table(features, cache.k, cache.v), entries], 2)
        chosen = torch.cat([cache.alive, ring.salient & over], 2)
        added = torch.cat([cache.position >= 0, over], 2) & ~chosen
        counts = [count_chosen(n, window, budget) for n in lengths]
        kept = first_true(chosen, max(counts) if budget.cap is None else budget.cap).flip(-1)  # the last one comes last
        table = torch.cat([take(entries, kept), table], 2)
        position = torch.cat([cache.position, held[:, None].expand(-1, H_kv, -1)], 2)
        scores = torch.cat([cache.scores, ring.scores], 2)
        queries = ring.k.new_zeros(B, H_kv, budget.chunk, group, K)
        marks = Marks(queries, ring.scores.gather(2, index), scores.gather(2, kept), position.gather(2, kept))
    sums = torch.cat([linear.kv, linear.k.unsqueeze(-1).expand(*linear.k.shape, ONES)], -1)
    sums = add_rows(sums, entries, added, ring.features.shape[3])
    return DecodingState(setting, state.length, Lengths(state.length, lengths), 0, table, sums, marks)


def _table(features: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([features, k, v, k.new_ones(*k.shape[:3], ONES)], -1)


@torch.no_grad()
def whole(state: DecodingState) -> HybridState:
    """The state in the form that any call of hybrid attention takes, in its own memory.

    Tokens that the window has let go of are in the sums already; in the ring they are zeros, which add nothing.
    """
    window, budget, R, M = state.setting.window, state.setting.budget, state.setting.room, state.cache_size
    lengths, (B, H_kv, _, width), Fs = state.lengths(), state.table.shape, state.sums.shape[2]
    length, V, device = state.length + state.steps, state.sums.shape[3] - ONES, state.table.device
    widths = [Fs, width - Fs - V - ONES, V, ONES]
    held = held_positions(length, R)
    starts = torch.tensor([window_start(n, window) for n in lengths], device=device)[:, None]
    place = held - starts if window.layout == "chunks" else torch.arange(R, device=device).expand(B, -1)
    index = place.clamp(min=0)[:, None].expand(-1, H_kv, -1)
    empty = (held < starts)[:, None].expand(-1, H_kv, -1)
    psi, k, v, _ = take(state.table[:, :, M:], index).masked_fill(empty.unsqueeze(-1), 0).split(widths, -1)
    scores, cache = state.sums.new_zeros(B, H_kv, R), None
    if budget is not None and state.marks is not None:
        rows = (state.writing_to([x[row : row + 1] for x in state.written]) for row in range(B))
        scores = torch.cat([scored(row, n) for row, n in zip(rows, lengths, strict=True)])
        scores = scores.gather(2, index).masked_fill(empty, 0)
        counts = torch.tensor([count_chosen(n, window, budget) for n in lengths], device=device)
        alive = (torch.arange(M, device=device) >= M - counts[:, None])[:, None].expand(-1, H_kv, -1)
        features, kept_k, kept_v, _ = state.table[:, :, :M].masked_fill(~alive.unsqueeze(-1), 0).split(widths, -1)
        kept_scores = state.marks.kept_scores.masked_fill(~alive, 0)
        position = state.marks.kept_position.masked_fill(~alive, -1)
        features = features[..., :0] if budget.cap is None else features
        cache = SalientCache(kept_k, kept_v, features, kept_scores, position, alive.clone())
    ring = WindowRing(k, v, psi, scores, torch.zeros_like(scores, dtype=torch.bool))
    linear = LinearState(state.sums[..., :V].clone(), state.sums[..., V].clone())
    return HybridState(length, ring, cache, linear)


@torch.no_grad()
def scored(state: DecodingState, length: int) -> Tensor:
    """Scores ``(B, H_kv, R)`` of the window's tokens after ``length`` tokens, including the latest chunk.

    Tokens since ``state.steps`` have queries, the others keep the scores they have. A score is how much a token attends
    to itself among the last L tokens, as in :func:`linattn.ops.hybrid.saliency.self_saliency`.
    """
    marks, budget = state.marks, state.setting.budget
    assert marks is not None
    assert budget is not None
    queries, scores, L, first = marks.queries, marks.scores, budget.chunk, window_start(length, state.setting.window)
    begins = max(max(length - 1, 0) // L * L, length - state.steps)
    if begins >= length:
        return scores
    Fs = state.sums.shape[2]
    keys = state.table[:, :, state.cache_size :, Fs : Fs + queries.shape[4]]
    q = queries[:, :, begins % L : begins % L + length - begins].to(scores.dtype) * state.setting.scale
    logits = q.flatten(2, 3) @ keys[:, :, : length - first].to(scores.dtype).mT
    logits = logits.unflatten(2, q.shape[2:4])  # (B, H_kv, m, G, n)
    t = torch.arange(begins - first, length - first, device=q.device)
    back = t[:, None] - torch.arange(length - first, device=q.device)
    others = logits.masked_fill(((back <= 0) | (back >= L)).unsqueeze(1), -torch.inf)
    itself = logits[..., begins - first :].diagonal(dim1=2, dim2=4).mT  # (B, H_kv, m, G)
    new = of_group(score_of(itself, others, budget.score), budget.reduce, 3)
    return torch.cat([scores[..., : begins - first], new, scores[..., length - first :]], 2)


def add_rows(sums: Tensor, rows: Tensor, where: Tensor, width: int) -> Tensor:
    """The sums with the entries of the table added that ``where (B, H_kv, N)`` marks; ``width`` of the features."""
    wide = rows.to(sums.dtype)
    features = wide[..., :width] * where.unsqueeze(-1)
    return sums + features.mT @ wide[..., -sums.shape[3] :]
