"""The chosen tokens of rows and for how long each stays exact: from a mask, or from scores and a budget."""

import torch
from torch import Tensor

from linattn.ops.hybrid_layout import Places, first_true, take
from linattn.ops.hybrid_types import FOREVER, SalientBudget, SalientCache, SalientList, Window
from linattn.ops.saliency import best_first, top_of_chunk

Table = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # k, v, features, scores and positions of the rows


def list_from_mask(chosen: Tensor, table: Table, cache: SalientCache | None) -> SalientList:
    """Tokens ``chosen (B, H_kv, S)`` stay exact for good. How many there are the host must know: on a GPU it waits."""
    most = int(chosen.sum(-1).max()) if chosen.numel() else 0
    index = first_true(chosen, most)
    until = torch.where(chosen.gather(2, index), FOREVER, 0)
    return _join(table, index, until, cache)


def list_from_scores(
    table: Table, places: Places, held: Tensor | None, budget: SalientBudget, window: Window, cache: SalientCache | None
) -> SalientList:
    """The best of each chunk of the rows, a whole number of chunks long; with a cap, until better ones need the room.

    ``held (B, H_kv, S)`` says which tokens of a state are chosen already, in chunks whose time came before.
    """
    scores, position = table[3], table[4]
    L, wait = budget.chunk, window.wait
    n = scores.shape[2] // L
    by_chunk = scores.unflatten(2, (n, L))
    # A choice counts from the first query whose window may have let go of the chunk.
    border = places.start[:, None] + (torch.arange(n, device=scores.device) + 1 + wait) * L  # (B, n)
    now = (border >= places.before[:, None]) & (border < places.after[:, None])
    chosen = top_of_chunk(by_chunk, position.unflatten(2, (n, L)), budget) & now[:, None, :, None]
    if held is not None:
        earlier = (border < places.before[:, None])[:, None, :, None]
        chosen = chosen | (held.unflatten(2, (n, L)) & earlier)
    slots = first_true(chosen, budget.most_per_chunk)  # (B, H_kv, n, most)
    until = torch.where(chosen.gather(3, slots), FOREVER, 0).flatten(2)
    index = (slots + (torch.arange(n, device=slots.device) * L)[:, None]).flatten(2)
    found = _join(table, index, until, cache, slots.shape[3], budget.cap)
    if budget.cap is None or n == 0:
        return found
    return _with_cap(found, border, budget)


def _with_cap(chosen: SalientList, border: Tensor, budget: SalientBudget) -> SalientList:
    """Chunk after chunk, the best ``cap`` of all so far stay; the others stop where the chunk's choice counts."""
    assert budget.cap is not None
    assert chosen.per_chunk is not None
    until = chosen.until
    order = torch.arange(until.shape[2], device=until.device).expand_as(until)
    current = order[..., : chosen.head]
    for c in range(border.shape[1]):
        first = chosen.head + c * chosen.per_chunk
        entries = torch.cat([current, order[..., first : first + chosen.per_chunk]], -1)
        scores, position, alive = (x.gather(2, entries) for x in (chosen.scores, chosen.position, until > 0))
        entries = entries.gather(2, best_first(scores, position, alive, budget))
        current, lost = entries[..., : budget.cap], entries[..., budget.cap :]
        if lost.shape[2]:
            end = border[:, c, None, None].expand_as(lost)
            until = until.scatter(2, lost, torch.minimum(until.gather(2, lost), end))
    return SalientList(
        chosen.k, chosen.v, chosen.features, chosen.scores, chosen.position, until, chosen.index, chosen.head,
        chosen.per_chunk, budget.cap,
    )  # fmt: skip


def _join(
    table: Table, index: Tensor, until: Tensor, cache: SalientCache | None, per_chunk: int | None = None,
    cap: int | None = None,
) -> SalientList:  # fmt: skip
    """The tokens of a cache that are still exact, and those of the rows after them."""
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
