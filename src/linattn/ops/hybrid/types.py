"""The types of hybrid attention: which keys are exact, how many may be chosen, and what a state remembers."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from linattn.ops.shared.call import check_choice, check_integer, check_number
from linattn.ops.shared.types import LinearState

Layout = Literal["sliding", "chunks"]
Units = Literal["row_max", "one"]
Score = Literal["log_prob", "kl"]
Reduce = Literal["mean", "max"]
LAYOUTS, UNITS, SCORES, REDUCTIONS = map(get_args, (Layout, Units, Score, Reduce))
# A position that no sequence reaches: a token that is exact until this position stays exact for good.
FOREVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Window:
    """Which of the latest keys a query sees exactly: its own and the ``size - 1`` before it, or chunks of keys.

    With chunks of ``size`` tokens a query sees its own chunk up to itself and ``delay`` whole chunks before.
    """

    size: int
    layout: Layout = "sliding"
    delay: int = 1

    def covers(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a key at or before the query is in its window; both are positions."""
        if self.size == 0:
            return (query < key) & (query > key)  # never, in the shape of the pair
        if self.layout == "sliding":
            return query - key < self.size
        return query.div(self.size, rounding_mode="floor") - key.div(self.size, rounding_mode="floor") <= self.delay

    @property
    def wait(self) -> int:
        """How many chunks after a chunk the choice among its tokens takes effect."""
        return self.delay if self.layout == "chunks" else 0

    def chunks_before(self, chunk: int) -> int:
        """Into how many chunks of ``chunk`` tokens before its own a query's window may reach."""
        if self.size == 0:
            return 0
        return self.delay if self.layout == "chunks" else -(-(self.size - 1) // chunk)

    def ring_size(self, budget: "SalientBudget | None") -> int:
        """How many of the latest tokens a state keeps: the window, and each chunk until its choice is made."""
        held = (1 + self.delay) * self.size if self.layout == "chunks" else self.size
        return max(held, 1 if budget is None else budget.chunk)


@dataclass(frozen=True)
class SalientBudget:
    """How many tokens stay exact for good: the ``ratio * chunk`` of each chunk with the highest scores.

    Args:
        ratio: share of each chunk's tokens that is chosen, rounded to whole tokens and at least one: with chunks of 8
            tokens, 1/16 chooses one. 0: only the sinks are chosen.
        chunk: number of tokens of a chunk, counted from the first real token of a sequence.
        cap: the largest number of chosen tokens at a time; beyond it, those with the lowest scores join the linear
            part. None: all stay, and memory grows with the sequence.
        sinks: number of first tokens that are chosen before all others of their chunk and never given up.
        score: how tokens are scored if the caller gives no scores: ``kind`` of
            :func:`linattn.ops.hybrid.saliency.self_saliency`.
        reduce: how the scores of query heads that share a key head become one: ``reduce`` of that function.

    Example:
        >>> [SalientBudget(1 / 16, chunk).per_chunk for chunk in (4, 8, 16, 64)]
        [1, 1, 1, 4]
    """

    ratio: float = 1 / 16
    chunk: int = 64
    cap: int | None = None
    sinks: int = 1
    score: Score = "log_prob"
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, least=0, most=1)
        check_integer("chunk", self.chunk)
        check_integer("sinks", self.sinks, least=0)
        if self.cap is not None and (not isinstance(self.cap, int) or self.cap < max(1, self.sinks)):
            raise ValueError(f"cap must be a whole number >= 1 and >= sinks ({self.sinks}), or None, got {self.cap!r}")
        check_choice("score", self.score, SCORES)
        check_choice("reduce", self.reduce, REDUCTIONS)

    @property
    def per_chunk(self) -> int:
        return max(1, round(self.ratio * self.chunk)) if self.ratio > 0 else 0

    @property
    def most_per_chunk(self) -> int:
        """The most tokens chosen of any chunk, including chunks full of sinks."""
        return max(self.per_chunk, min(self.sinks, self.chunk))

    def chosen_of(self, chunks: int) -> int:
        """How many tokens of the first ``chunks`` chunks are chosen, before the cap."""
        mixed = min(chunks, -(-self.sinks // self.chunk))  # chunks with sinks
        first = sum(max(self.per_chunk, min(self.sinks - i * self.chunk, self.chunk)) for i in range(mixed))
        return first + (chunks - mixed) * self.per_chunk


class WindowRing(NamedTuple):
    """The latest R tokens; the token at position p is in slot ``p mod R``. Slots not reached yet hold zeros."""

    k: Tensor  # (B, H_kv, R, K)
    v: Tensor  # (B, H_kv, R, V)
    features: Tensor  # (B, H_kv, R, F)
    scores: Tensor  # (B, H_kv, R)
    salient: Tensor  # (B, H_kv, R) bool: to be kept exact when it leaves the ring


class SalientCache(NamedTuple):
    """Chosen tokens older than the ring, in M slots.

    A token that lost its place (``alive`` False, ``position >= 0``) belongs to the linear part from then on: it is read
    from its slot until another token needs the slot, and is added to the sums then.
    """

    k: Tensor  # (B, H_kv, M, K)
    v: Tensor  # (B, H_kv, M, V)
    features: Tensor  # (B, H_kv, M, F)
    scores: Tensor  # (B, H_kv, M)
    position: Tensor  # (B, H_kv, M) int64, -1: empty
    alive: Tensor  # (B, H_kv, M) bool


class HybridState(NamedTuple):
    """State of hybrid attention: the latest tokens, the chosen ones, and the sums over the rest.

    ``length (B,)`` counts the real tokens so far. Keys, values and features are kept in their own dtype, the sums in
    fp32, or fp64 for fp64 inputs. ``salient`` is None without a budget. With a ``cap`` it has that many
    slots, so that the size of the state is constant; otherwise it grows with the number of chosen tokens.
    """

    length: Tensor
    window: WindowRing
    salient: SalientCache | None
    linear: LinearState


class HybridOutput(NamedTuple):
    """Output ``(B, H, T, V)`` together with the state after the last token."""

    output: Tensor
    state: HybridState


class HybridSums(NamedTuple):
    """The two parts of a form's result before they are joined; the exact part is in units of ``e^{log_max_t}``."""

    exact: Tensor  # (B, H, T, V): sum of e^{s_ti - m_t} v_i
    exact_total: Tensor  # (B, H, T)
    log_max: Tensor  # (B, H, T): m_t, the largest exact logit; -inf without exact keys
    linear: Tensor  # (B, H, T, V): sum of (phi_t . psi_i) v_i
    linear_total: Tensor  # (B, H, T)


@dataclass(frozen=True)
class Rows:
    """Sequences laid out so that chunks begin at multiples of their size, with the tokens of a state in front.

    Token i of row b has the position ``start_b + i``. It takes part if it is ``real``; if it was chosen, it is exact
    for queries before its ``until``, also outside of windows. Tensors are in the dtype of the computation, and zero
    where not real.
    """

    q: Tensor  # (B, H, S, K), scaled
    k: Tensor  # (B, H_kv, S, K)
    v: Tensor  # (B, H_kv, S, V)
    query_features: Tensor  # (B, H, S, F)
    key_features: Tensor  # (B, H_kv, S, F)
    start: Tensor  # (B,) int64, a multiple of chunk
    real: Tensor  # (B, S) bool
    chunk: int
    window: Window
    initial: LinearState
    scores: Tensor | None = None  # (B, H_kv, S)
    salient: "SalientList | None" = None

    @property
    def position(self) -> Tensor:
        return self.start[:, None] + torch.arange(self.k.shape[2], device=self.k.device)


@dataclass(frozen=True)
class SalientList:
    """All tokens that are chosen at some time, oldest first; ``until`` is 0 in slots that hold none.

    The first ``head`` slots come from a state. Each chunk has ``per_chunk`` slots after these.
    ``steady``: some of the first tokens stay for good, so every query has to look from the first slot on.
    """

    k: Tensor  # (B, H_kv, N, K)
    v: Tensor  # (B, H_kv, N, V)
    features: Tensor  # (B, H_kv, N, F)
    scores: Tensor  # (B, H_kv, N)
    position: Tensor  # (B, H_kv, N) int64
    until: Tensor  # (B, H_kv, N) int64: the position of the first query that does not see it exactly
    index: Tensor  # (B, H_kv, N - head) int64: where in the rows it lies
    head: int
    per_chunk: int
    cap: int | None = None
    steady: bool = False

    def until_of_rows(self, length: int) -> Tensor:
        """``(B, H_kv, S)``: ``until`` of every token of the rows, 0 of those never chosen."""
        until = self.until[..., self.head :]
        return until.new_zeros(*until.shape[:2], length).scatter_reduce(2, self.index, until, "amax")
