"""The chosen tokens of rows, and how long each stays exact: from a mask, or from scores and a budget."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.hybrid.layout import Places, first_true, take
from linattn.ops.hybrid.saliency import best_first, chunk_order, top_of_chunk
from linattn.ops.hybrid.types import FOREVER, SalientBudget, SalientCache, SalientList, Window

Table = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # k, v, features, scores and positions of the rows
MOST_PAIRS = 2**24  # of tokens that are compared at a time


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
    found = _join(table, index, until, cache, slots.shape[3], budget.cap)
    if budget.cap is None or n == 0:
        return replace(found, steady=True)  # nothing ends
    return _with_cap(found, border, budget)


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
    return SalientList(
        chosen.k, chosen.v, chosen.features, chosen.scores, chosen.position, until, chosen.index, chosen.head,
        chosen.per_chunk, budget.cap, budget.sinks > 0,
    )  # fmt: skip


def _comes_last(rank: Tensor, cap: int) -> Tensor:
    """For each entry of ``rank (..., N)``, the place of the ``cap``-th entry with a lower rank; N if there is none."""
    N = rank.shape[-1]
    rows = max(MOST_PAIRS // max(rank.numel(), 1), 1)
    found = [
        ((rank.unsqueeze(-2) < own.unsqueeze(-1)).cumsum(-1, dtype=torch.int32) < cap).sum(-1)
        for own in rank.split(rows, -1)
    ]
    return torch.cat(found, -1) if N else rank


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
