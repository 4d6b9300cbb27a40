"""Which tokens are worth keeping exact: scores from queries and keys alone, the choice, and how long each stays exact.

    p_t = exp(s_tt) / sum_{i in W_t} exp(s_ti),     s_ti = scale q_t . k_i,     W_t = the last tokens up to t

The logarithm of p is computed as ``-log(1 + exp(log sum_{i != t} exp(s_ti) - s_tt))``, which keeps its digits where p
is close to 1. A token that attends to itself carries what its window does not. ``log p_t`` ranks tokens as the
divergence between the attention of t with and without itself, ``p log((p + eps) / eps) + (1 - p) log(1 - p)``, does,
because that grows with p. The two agree for one query head, and for the largest score of several heads that share a
key head, but not for their mean: a head that hardly attends to the token pulls a mean of logarithms down, and a head
that attends strongly raises a mean of divergences.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.hybrid.layout import Places, first_true, take
from linattn.ops.hybrid.types import (
    FOREVER,
    REDUCTIONS,
    SCORES,
    HybridState,
    Reduce,
    SalientBudget,
    SalientCache,
    SalientList,
    Score,
    Window,
)
from linattn.ops.shared import checks
from linattn.ops.shared.call import compute_dtype

Table = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # k, v, features, scores and positions of the rows
MOST_PAIRS = 2**24  # of tokens that are compared at a time
PUBLISHED_EPS = 1e-8  # inside the logarithms of the divergence


@torch.no_grad()
def self_saliency(
    q: Tensor,
    k: Tensor,
    *,
    window: int = 64,
    scale: float | None = None,
    kind: Score = "log_prob",
    reduce: Reduce = "mean",
    key_mask: Tensor | None = None,
    state: HybridState | None = None,
    eps: float = PUBLISHED_EPS,
) -> Tensor:
    """How much each token attends to itself among the last ``window`` real tokens: ``(B, H_kv, T)``, without gradients.

    ``p_t = exp(s_tt) / sum_{i in W_t} exp(s_ti)`` with ``s_ti = scale q_t . k_i`` and ``W_t`` the last tokens up to t

    Args:
        q: ``(B, H, T, K)``.
        k: ``(B, H_kv, T, K)``; the scores of the query heads that share a key head are reduced to one.
        window: number of tokens of ``W_t``, including t.
        scale: factor on the logits; None: ``K**-0.5``.
        kind: ``"log_prob"``: ``log p_t``; ``"kl"``: the divergence, with ``eps`` inside its logarithms as published.
            While ``p > eps`` both choose the same tokens if a key head has one query head, or with ``reduce="max"``.
            Their means over several query heads choose differently: with 4 independent heads, about half of the
            chosen tokens are the same.
        reduce: ``"mean"`` or ``"max"`` over the query heads of a key head.
        key_mask: ``(B, T)`` bool, True = real token; masked tokens are in no window and score 0.
        state: state after the tokens before these; its ring must hold ``window - 1`` tokens.

    Example:
        >>> import torch
        >>> from linattn.ops.hybrid.saliency import self_saliency
        >>> k = torch.tensor([[0.0, 1.0], [0.0, 1.0], [4.0, 0.0]])[None, None]
        >>> self_saliency(k, k, window=2).argsort().flatten().tolist()  # one of two equal tokens, a new one, the first
        [1, 2, 0]
    """
    _check(q, k, window, kind, reduce, key_mask, state)
    ring = 1 if state is None else state.window.k.shape[2]
    before = None if state is None else state.length
    places = Places(q.shape[0], q.shape[2], key_mask, before, ring, 1, q.device)
    dtype = compute_dtype(q, k)
    q = places.gather(q.to(dtype)) * (q.shape[3] ** -0.5 if scale is None else scale)
    rows = places.gather(k.to(dtype), None if state is None else state.window.k)
    return places.back(window_scores(q, rows, places.real, window, kind, reduce, eps))


def window_scores(
    q: Tensor, k: Tensor, real: Tensor, window: int, kind: Score = "log_prob", reduce: Reduce = "mean",
    eps: float = PUBLISHED_EPS,
) -> Tensor:  # fmt: skip
    """:func:`self_saliency` of rows ``(B, H, S, K)`` without gaps, in blocks of ``window`` queries; q comes scaled."""
    H_kv, S = k.shape[1], k.shape[2]
    n = max(1, -(-S // window))  # one block where there are no tokens at all
    more = n * window - S
    q = F.pad(q, (0, 0, 0, more)) if more else q
    # (B, H_kv, n, G W, K): heads of a group beside the tokens of a block, so that they share one copy of its keys
    q = q.unflatten(2, (n, window)).unflatten(1, (H_kv, -1)).transpose(2, 3).flatten(3, 4)
    keys = F.pad(k, (0, 0, window, more)).unfold(
        2, 2 * window, window
    )  # (B, H_kv, n, K, 2W): the block before, its own
    seen = F.pad(real, (window, more)).unfold(1, 2 * window, window)  # (B, n, 2W)
    t, i = torch.arange(window, 2 * window, device=k.device)[:, None], torch.arange(2 * window, device=k.device)
    hidden = ~(((t > i) & (t - i < window)) & seen.unsqueeze(2))[:, None, :, None]  # (B, 1, n, 1, W, 2W), itself too
    logits = (q @ keys).unflatten(3, (-1, window))  # (B, H_kv, n, G, W, 2W)
    itself = logits[..., window:].diagonal(dim1=-2, dim2=-1)
    others = logits.masked_fill(hidden, -torch.inf)
    scores = of_group(score_of(itself, others, kind, eps), reduce, 3).flatten(2)[..., :S]
    return scores.masked_fill(~real[:, None], 0)


def score_of(itself: Tensor, others: Tensor, kind: Score, eps: float = PUBLISHED_EPS) -> Tensor:
    """Score each query head's attention to its own token, before heads are reduced.

    With the token itself in the softmax, it has the weight p and each other token of the window ``a_i = (1 - p) b_i``;
    without it, the others have the weights ``b_i``.

    Args:
        itself: ``(...)``, the logit of the token itself.
        others: ``(..., N)``, the logits of the window's other tokens; -inf: not in the window.
    """
    total = others.logsumexp(-1)
    log_p = -torch.logaddexp(total - itself, itself.new_zeros(()))
    if kind == "log_prob":
        return log_p
    p, rest = log_p.exp(), -torch.logaddexp(itself - total, itself.new_zeros(()))
    b = torch.where((total == -torch.inf).unsqueeze(-1), 0.0, (others - total.unsqueeze(-1)).exp())
    a = rest.exp().unsqueeze(-1) * b
    return p * ((p + eps) / eps).log() + (a * ((a + eps) / (b + eps)).log()).sum(-1)


def of_group(scores: Tensor, reduce: Reduce, dim: int) -> Tensor:
    """Reduce the scores of the query heads that share a key head, which lie along ``dim``, to one."""
    return scores.mean(dim) if reduce == "mean" else scores.amax(dim)


@torch.no_grad()
def choose_salient(scores: Tensor, budget: SalientBudget, *, key_mask: Tensor | None = None) -> Tensor:
    """Choose the ``budget.per_chunk`` tokens with the highest scores of each chunk; returns ``(B, H_kv, T)`` bool.

    Chunks are counted from the first real token; of an incomplete chunk none is chosen. Sinks come first, then
    higher scores, then earlier tokens. ``budget.cap`` is not applied, because it depends on the time of the query.

    Example:
        >>> import torch
        >>> from linattn.ops.hybrid.saliency import choose_salient
        >>> from linattn.ops.hybrid.types import SalientBudget
        >>> scores = torch.tensor([[[0.0, 3.0, 3.0, 1.0, 2.0, 5.0]]])
        >>> choose_salient(scores, SalientBudget(ratio=0.5, chunk=4, sinks=0)).nonzero()[:, 2].tolist()
        [1, 2]
    """
    checks.check_tensor("scores", scores, "(B, H_kv, T)", 3)
    B, _, T = scores.shape
    checks.check_key_mask(key_mask, B, T, scores)
    places = Places(B, T, key_mask, None, 1, 1, scores.device)
    rows = places.gather(scores)
    n = T // budget.chunk
    position = torch.arange(n * budget.chunk, device=scores.device)
    whole = position.div(budget.chunk, rounding_mode="floor") + 1 <= (places.after // budget.chunk)[:, None]
    by_chunk = rows[..., : n * budget.chunk].unflatten(2, (n, budget.chunk))
    chosen = top_of_chunk(by_chunk, position.unflatten(0, (n, budget.chunk)), budget).flatten(2) & whole[:, None]
    return places.back(F.pad(chosen, (0, T - chosen.shape[2])))


def top_of_chunk(scores: Tensor, position: Tensor, budget: SalientBudget) -> Tensor:
    """Which of the tokens ``(..., chunk)`` of complete chunks are chosen."""
    order = chunk_order(scores, position, budget)
    return (order.argsort(-1) < budget.per_chunk) | (position < budget.sinks).expand_as(scores)


def chunk_order(scores: Tensor, position: Tensor, budget: SalientBudget) -> Tensor:
    """Order of the tokens ``(..., chunk)`` by rank: sinks, then higher scores, then earlier tokens."""
    return scores.masked_fill(position < budget.sinks, torch.inf).argsort(dim=-1, descending=True, stable=True)


def best_first(
    scores: Tensor, position: Tensor, alive: Tensor, budget: SalientBudget, *, by_age: bool = False
) -> Tensor:
    """Order of the entries ``(..., N)`` by rank: sinks, higher scores, earlier tokens; entries not alive come last.

    by_age: the entries that are alive are already in the order of their positions.
    """
    scores = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill(position < budget.sinks, torch.inf)
    ranked = scores.masked_fill(~alive, -torch.inf)
    if by_age:
        return ranked.argsort(dim=-1, descending=True, stable=True)
    order = position.argsort(dim=-1, stable=True)
    return order.gather(-1, ranked.gather(-1, order).argsort(dim=-1, descending=True, stable=True))


def step_score(q: Tensor, k: Tensor, held: Tensor, length: Tensor, budget: SalientBudget) -> Tensor:
    """The score of one token, with q ``(B, H_kv, G, K)``, scaled, k ``(B, H_kv, K)`` and ``held``, the ring's keys."""
    back = torch.arange(1, budget.chunk, device=k.device)
    position = length[:, None] - back  # (B, W - 1)
    slot = position.remainder(held.shape[2])[:, None].expand(-1, k.shape[1], -1)
    before = (q @ take(held, slot).mT).masked_fill((position < 0)[:, None, None], -torch.inf)
    itself = (q * k.unsqueeze(2)).sum(-1)
    return of_group(score_of(itself, before, budget.score), budget.reduce, 2)


def _check(
    q: Tensor, k: Tensor, window: int, kind: str, reduce: str, key_mask: Tensor | None, state: HybridState | None
) -> None:
    checks.check_tensor("q", q, "(B, H, T, K)", 4)
    checks.check_tensor("k", k, "(B, H_kv, T, K)", 4)
    checks.check_groups(q.shape[1], k.shape[1])
    checks.check_shape("k", k, (q.shape[0], k.shape[1], q.shape[2], q.shape[3]))
    checks.check_choice("kind", kind, SCORES)
    checks.check_choice("reduce", reduce, REDUCTIONS)
    checks.check_integer("window", window)
    checks.check_key_mask(key_mask, q.shape[0], q.shape[2], q)
    if state is not None and state.window.k.shape[2] < window - 1:
        raise ValueError(f"state keeps {state.window.k.shape[2]} tokens, but window={window} looks at more")


def list_from_mask(chosen: Tensor, table: Table, cache: SalientCache | None) -> SalientList:
    """The list of tokens ``chosen (B, H_kv, S)``, exact for good. The host must know how many: it waits for a GPU."""
    most = int(chosen.sum(-1).max()) if chosen.numel() else 0
    index = first_true(chosen, most)
    until = torch.where(chosen.gather(2, index), FOREVER, 0)
    return _join(table, index, until, cache)


def list_from_scores(
    table: Table, places: Places, held: Tensor | None, budget: SalientBudget, window: Window, cache: SalientCache | None
) -> SalientList:
    """The list of the best tokens of each chunk, exact for good, or with a cap until better ones need the room.

    The rows are a whole number of chunks long. ``held (B, H_kv, S)`` says which tokens of a state are chosen already,
    in chunks whose choice was due before.
    """
    scores, position = table[3], table[4]
    L, wait = budget.chunk, window.wait
    n = scores.shape[2] // L
    by_chunk = scores.unflatten(2, (n, L))
    # A choice takes effect from the first query whose window may have let go of the chunk.
    border = places.start[:, None] + (torch.arange(n, device=scores.device) + 1 + wait) * L  # (B, n)
    now = (border >= places.before[:, None]) & (border < places.after[:, None])
    now = now[:, None, :, None]
    if held is None and budget.per_chunk == budget.most_per_chunk:  # all chunks fill their slots, or none of them
        slots = chunk_order(by_chunk, position.unflatten(2, (n, L)), budget)[..., : budget.per_chunk].sort(-1).values
        until = torch.where(now, FOREVER, 0).expand_as(slots).flatten(2)
    else:
        chosen = top_of_chunk(by_chunk, position.unflatten(2, (n, L)), budget) & now
        if held is not None:
            earlier = (border < places.before[:, None])[:, None, :, None]
            chosen = chosen | (held.unflatten(2, (n, L)) & earlier)
        slots = first_true(chosen, budget.most_per_chunk)  # (B, H_kv, n, most)
        until = torch.where(chosen.gather(3, slots), FOREVER, 0).flatten(2)
    index = (slots + (torch.arange(n, device=slots.device) * L)[:, None]).flatten(2)
    chosen_list = _join(table, index, until, cache, slots.shape[3], budget.cap)
    if budget.cap is None or n == 0:
        return replace(chosen_list, steady=True)  # nothing ends
    return _with_cap(chosen_list, border, budget)


def _with_cap(chosen: SalientList, border: Tensor, budget: SalientBudget) -> SalientList:
    """After each chunk the best ``cap`` of all stay exact; the others stop where the chunk's choice takes effect.

    A token stops at the chunk that brings the last of ``cap`` better ones. A token that has stopped never comes back,
    so all chunks can be computed together.
    """
    assert budget.cap is not None
    assert chosen.per_chunk is not None
    alive, n = chosen.until > 0, border.shape[1]
    rank = best_first(chosen.scores, chosen.position, alive, budget, by_age=chosen.head == 0).argsort(-1)
    entries = torch.arange(rank.shape[2], device=rank.device)
    chunk = F.pad(((entries - chosen.head) // max(chosen.per_chunk, 1)).clamp(min=0), (0, 1), value=n)
    crowded = chunk[_comes_last(rank.masked_fill(~alive, rank.shape[2]), budget.cap)]  # n: never
    ends = torch.cat([border, border.new_full((border.shape[0], 1), FOREVER)], 1)[:, None].expand(-1, rank.shape[1], -1)
    until = torch.minimum(chosen.until, ends.gather(2, torch.maximum(chunk[:-1], crowded)))
    return replace(chosen, until=until, cap=budget.cap, steady=budget.sinks > 0)


def _comes_last(rank: Tensor, cap: int) -> Tensor:
    """For each entry of ``rank (..., N)``, the place of the ``cap``-th entry with a lower rank; N if there is none."""
    N = rank.shape[-1]
    rows = max(MOST_PAIRS // max(rank.numel(), 1), 1)
    places = [
        ((rank.unsqueeze(-2) < part.unsqueeze(-1)).cumsum(-1, dtype=torch.int32) < cap).sum(-1)
        for part in rank.split(rows, -1)
    ]
    return torch.cat(places, -1) if N else rank


def _join(
    table: Table, index: Tensor, until: Tensor, cache: SalientCache | None, per_chunk: int | None = None,
    cap: int | None = None,
) -> SalientList:  # fmt: skip
    """The list of the tokens of a cache that are still exact, followed by those of the rows."""
    k, v, features, scores, position = (take(x, index) for x in table)
    if cache is None:
        return SalientList(k, v, features, scores, position, until, index, 0, per_chunk, cap)
    old = cache.features
    if old.shape[3] != features.shape[3]:  # a cache without a cap keeps no features: nothing leaves it
        old = old.new_zeros(*old.shape[:3], features.shape[3])
    return SalientList(
        torch.cat([cache.k.to(k), k], 2), torch.cat([cache.v.to(v), v], 2), torch.cat([old.to(features), features], 2),
        torch.cat([cache.scores.to(scores), scores], 2), torch.cat([cache.position, position], 2),
        torch.cat([torch.where(cache.alive, FOREVER, 0), until], 2), index, cache.k.shape[2], per_chunk, cap,
    )  # fmt: skip
