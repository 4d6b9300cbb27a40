"""How a call of a decay per channel is cut up: tiles by width and dtype, segments of the sequence, sizes of grids.

Widths are cut into K parts and V parts that know nothing of each other: channels decay by themselves, so outputs add up
over K parts and gradients of q, k and the decay over V parts. Up to 128 wide (64 for fp32 and fp16, whose operands are
four bytes) there is one part and no sum.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

# With fewer programs the sequence is cut into segments, as many as run at once, two on a multiprocessor.
_ENOUGH = 192
_AT_ONCE = 264
_SHORTEST = 512


@dataclass(frozen=True)
class Tiles:
    """Block sizes of one kernel: tokens, channels, value columns; warps and pipeline stages."""

    chunk: int
    k: int
    v: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """All choices of a call; ``span`` tokens of a segment (0: the whole sequence)."""

    forward: Tiles
    query_grad: Tiles  # takes all sizes from key_grad
    key_grad: Tiles
    value_grad: Tiles
    states: Tiles  # channels of key_grad: what is one tile is mild or strong as one, and rounded so
    near: Tiles  # takes all but its warps from the sweep it completes
    span: int = 0


@dataclass(frozen=True)
class Inputs:
    """What every pass reads: q (B, H, T, K), k and a (B, H_kv, T, K), v (B, H_kv, T, V)."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    shift: bool  # decay_index "key": a token is decayed by what the token before it brought

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, H, T, K, V."""
        B, H, T, K = self.q.shape
        return B, H, T, K, self.v.shape[3]

    @property
    def groups(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


@dataclass(frozen=True)
class Cut:
    """Segments of one row: how many, how long, and for packed sequences a table of them (see ``parts.place``)."""

    segments: int
    span: int
    table: Tensor | None
    several: bool  # a sequence may have more than one


def plan_for(x: Inputs) -> Plan:
    B, H, T, K, V = x.sizes
    if x.q.dtype == torch.bfloat16:
        k, v = _tile(K, 128), _tile(V, 128)
        if min(k, v) >= 64:
            # Half a state takes 64 registers of each thread of 4 warps, and two programs share a multiprocessor: one
            # computes while the other waits. Outputs need all channels and halve the values, gradients of q and k the
            # other way round. One stage: two programs hide a load as well as a third of the shared memory would.
            outputs, gradients = Tiles(64, k, 64, 4, 1), Tiles(64, 64, v, 4, 1)
            states = replace(outputs, k=64)
            plan = Plan(outputs, gradients, gradients, outputs, states, replace(outputs, warps=2))
        else:
            # Products of 64 tokens with narrow operands have come out wrong on Hopper.
            square = Tiles(32, k, v, 4, 3)
            half = replace(square, k=min(k, 64))
            plan = Plan(square, half, half, square, half, square)
    else:
        k, v, exact = _tile(K, 64), _tile(V, 64), x.q.dtype == torch.float32
        tiles = Tiles(16 if exact else 32, k, v, 8 if exact and k * v > 32 * 32 else 4, 1)
        plan = Plan(tiles, tiles, tiles, tiles, tiles, tiles)
    programs = B * H * triton.cdiv(K, plan.forward.k) * triton.cdiv(V, plan.forward.v)
    if x.cu_seqlens is not None:
        programs *= max(1, x.sequences)
    if programs < _ENOUGH and T > _SHORTEST:
        wanted = triton.cdiv(T, max(1, _AT_ONCE // programs))
        plan = replace(plan, span=max(_SHORTEST, triton.cdiv(wanted, 64) * 64))
    return plan


def cut_up(x: Inputs, plan: Plan) -> Cut:
    """Segments of a row. Packed sequences need no look at their lengths: the table has room for any."""
    T, span = x.sizes[2], plan.span
    if x.cu_seqlens is None:
        return Cut(max(1, triton.cdiv(T, span)) if span else 1, span or T, None, bool(span) and span < T)
    cu = x.cu_seqlens.long()
    first, last = cu[:-1], cu[1:]
    if not span:
        sequence = torch.arange(x.sequences, device=cu.device)
        return Cut(x.sequences, T, torch.stack([first, last, sequence, first, last], 1), False)
    until = ((last - first + span - 1) // span).cumsum(0)
    segment = torch.arange(T // span + x.sequences, device=cu.device)
    sequence = torch.searchsorted(until, segment, right=True)
    there = sequence < x.sequences
    sequence = sequence.clamp(max=x.sequences - 1)
    first, last = first[sequence], last[sequence]
    before = (until - (cu[1:] - cu[:-1] + span - 1) // span)[sequence]
    start = first + (segment - before) * span
    table = torch.stack([start, torch.minimum(start + span, last), sequence, first, last], 1)
    # A row of zeros is an empty segment, which every kernel passes over.
    return Cut(segment.shape[0], span, table.masked_fill(~there[:, None], 0), True)


def _tile(width: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(width)))


def parts_of(x: Inputs, tiles: Tiles) -> int:
    return triton.cdiv(x.sizes[3], tiles.k) * triton.cdiv(x.sizes[4], tiles.v)


def slots_of(x: Inputs, cut: Cut, tiles: Tiles) -> int:
    """Room for the chunks of a row: each segment may end in a part of one."""
    return x.sizes[2] // tiles.chunk + cut.segments + 1


def blocks_of(x: Inputs, slots: int, tiles: Tiles) -> tuple[int, int]:
    """Programs and chunk slots for each: most find nothing to do, so few programs look at many slots."""
    heads = x.sizes[0] * x.sizes[1] * parts_of(x, tiles)
    block = next((n for n in (1, 8) if heads * triton.cdiv(slots, n) <= 4096), 64)
    return heads * triton.cdiv(slots, block), block


def no_chunks(x: Inputs, cut: Cut, tiles: Tiles) -> Tensor:
    """Where a sweep notes the chunks it leaves to ``near_grad``."""
    B, H, _, K, V = x.sizes
    shape = triton.cdiv(K, tiles.k), triton.cdiv(V, tiles.v), B, H, slots_of(x, cut, tiles), 2
    return x.q.new_full(shape, -1, dtype=torch.int64)


def programs_of(x: Inputs, cut: Cut, tiles: Tiles) -> int:
    return x.sizes[0] * x.sizes[1] * cut.segments * parts_of(x, tiles)


def widths(x: Inputs, tiles: Tiles) -> dict[str, int]:
    _, _, _, K, V = x.sizes
    parts = {"NK": triton.cdiv(K, tiles.k), "NV": triton.cdiv(V, tiles.v)}
    return {"K": K, "V": V, "BK": tiles.k, "BV": tiles.v, "C": tiles.chunk, **parts, **_precision(x)}


def _precision(x: Inputs) -> dict[str, Any]:
    """bf16 multiplies as it is. fp16 as tf32: the same digits, but the range that states and decays need."""
    if x.q.dtype == torch.bfloat16:
        return {"EXACT": False, "DT": tl.bfloat16, "PRECISION": "ieee"}
    exact = x.q.dtype == torch.float32
    return {"EXACT": exact, "DT": tl.float32, "PRECISION": "ieee" if exact else "tf32"}


def near_widths(x: Inputs, tiles: Tiles) -> dict[str, Any]:
    """``widths`` for ``near`` and ``near_grad``, which take few channels at a time."""
    return {**widths(x, tiles), "BN": min(32, tiles.k), "LEVELS": tiles.chunk.bit_length() - 1}


def flags(x: Inputs, cut: Cut) -> dict[str, Any]:
    return {
        "SHIFT": int(x.shift),
        "MASKED": x.mask is not None,
        "PACKED": cut.table is not None,
        "SEGMENTED": cut.several,
    }


def options_of(tiles: Tiles) -> dict[str, int]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    """Of batch, head and token; channels lie one after the other."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def mask_strides(x: Inputs) -> tuple[int, ...]:
    return (0, 0) if x.mask is None else x.mask.stride()


def any_of(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel wants a pointer even where it reads nothing."""
    return other if tensor is None else tensor
