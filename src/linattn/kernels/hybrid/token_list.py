"""Which chosen tokens count for which chunk of queries, in the form that kernels read: in chunks of a row."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.hybrid.types import Rows, SalientList

NEVER = 1 << 30  # the number of a chunk that no row has


class Listed(NamedTuple):
    """A list of N slots, filled up to whole blocks; a slot counts for chunks ``begin <= c < end``."""

    places: Tensor  # (B, H_kv, N - head) int64: where the tokens lie in the rows
    begin: Tensor  # (B, H_kv, N) int32
    end: Tensor  # (B, H_kv, N) int32
    spans: Tensor  # (B, H_kv, chunks, 2) int32: the range of slots that may count, from the start of a block
    ends: Tensor  # (B, H_kv, S) int32: ``end`` of every token of the rows, 0 if it is never chosen
    slots: Tensor  # (B, H_kv, S) int32: slot of every token of the rows, -1 if it is never chosen
    joining: Tensor | None  # (B, H_kv, chunks, E) int64: slots whose tokens join the sums after the chunk; -1: none


def listed(rows: Rows, back: int, block: int) -> Listed | None:
    """The list, or None if no tokens are chosen. ``back``: how many chunks before its own a query sees in pairs."""
    chosen = rows.salient
    if chosen is None or chosen.k.shape[2] == 0:
        return None
    S, L, device = rows.k.shape[2], rows.chunk, rows.k.device
    chunks, head = S // L, chosen.head
    more = -chosen.k.shape[2] % block
    index, until = (F.pad(x, (0, more)) if more else x for x in (chosen.index, chosen.until))
    B, H_kv, own = index.shape
    N = head + own
    end = _in_chunks(until, rows)
    begin = index.div(L, rounding_mode="floor").int() + (back + 1)
    if head:
        begin = torch.cat([begin.new_zeros(B, H_kv, head), begin], 2)
    order = torch.arange(N, device=device, dtype=torch.int32).expand(B, H_kv, N)
    if chosen.steady and chosen.per_chunk is not None:
        spans = _steady_spans(chosen, chunks, back).expand(B, H_kv, -1, -1)
    else:
        spans = _spans(order.long(), begin, end, chunks, block)
    own_end = end[..., head:]
    kept = until[..., head:] > 0
    slots = torch.full((B, H_kv, S + 1), -1, dtype=torch.int32, device=device)
    slots = slots.scatter(2, torch.where(kept, index, S), order[..., head:])[..., :S]
    return Listed(
        index, begin.contiguous(), end.contiguous(), spans.contiguous(),
        own_end.new_zeros(B, H_kv, S).scatter_reduce(2, index, own_end, "amax"), slots.contiguous(),
        _joining(begin, end, chunks, chosen),
    )  # fmt: skip


def _spans(order: Tensor, begin: Tensor, end: Tensor, chunks: int, block: int) -> Tensor:
    """For each chunk the range from the first slot that still counts, rounded down to a block, to the last so far."""
    B, H_kv, N = order.shape
    counts = (end > begin) & (begin < chunks)
    room = torch.zeros(B, H_kv, chunks + 1, dtype=torch.int64, device=order.device)
    high = room.scatter_reduce(2, begin.clamp(max=chunks).long(), torch.where(counts, order + 1, 0), "amax")
    high = high.cummax(2).values[..., :chunks]
    last = torch.where(counts, (end - 1).clamp(max=chunks - 1), chunks).long()
    low = (room + N).scatter_reduce(2, last, order, "amin")[..., :chunks]
    low = torch.minimum(low.flip(2).cummin(2).values.flip(2), high).div(block, rounding_mode="floor") * block
    return torch.stack([low, high], -1).int()


def _steady_spans(chosen: SalientList, chunks: int, back: int) -> Tensor:
    """Spans ``(chunks, 2)`` from the first slot to the last of the latest chunk that is not near."""
    assert chosen.per_chunk is not None
    away = (torch.arange(chunks, dtype=torch.int32, device=chosen.k.device) - back).clamp(min=0)
    return F.pad((away * chosen.per_chunk + chosen.head).unsqueeze(-1), (1, 0))


def _in_chunks(until: Tensor, rows: Rows) -> Tensor:
    """The numbers of the chunks at whose beginnings the times ``until`` lie, or ``NEVER``."""
    after = (until - rows.start[:, None, None]).clamp(min=0)
    return after.div(rows.chunk, rounding_mode="floor").clamp(max=NEVER).int()


def _joining(begin: Tensor, end: Tensor, chunks: int, chosen: SalientList) -> Tensor | None:
    """``joining`` of ``Listed``: with a cap, at most as many tokens give way at a time as are newly chosen."""
    if chosen.cap is None or chosen.per_chunk is None:
        return None
    key = torch.where((end > begin) & (end < chunks), end, NEVER).contiguous()
    found, order = key.sort(dim=-1, stable=True)
    borders = torch.arange(1, chunks + 2, dtype=torch.int32, device=key.device).expand(*key.shape[:2], -1).contiguous()
    first = torch.searchsorted(found, borders)
    first, count = first[..., :-1], first.diff(dim=-1)
    nth = torch.arange(chosen.per_chunk, device=key.device)
    place = (first.unsqueeze(-1) + nth).clamp(max=key.shape[2] - 1)
    joining = order.gather(2, place.flatten(2)).view(place.shape)
    return torch.where(nth < count.unsqueeze(-1), joining, -1)
