# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton adds tuples, but does not unpack them)
"""Where a walk over the gap-free row of a causal convolution reads and writes.

Gaps and boundaries are removed by walking over slots instead of tokens: a row of the batch is laid out as, sequence
after sequence, the W-1 inputs before it and then its real tokens. There the plain convolution is right everywhere.
A slot has a *place*:

    p >= 0    token p of this row of the batch
    p = -1    nothing (reads as 0)
    p <= -2   row -(p + 2) of initial (N (W-1), C)

Without a mask and packed sequences places follow from the slot's number; else they come from a table (B, slots).
"""

import triton
import triton.language as tl


@triton.jit
def place_of(slot, places, b, slots, W: tl.constexpr, HAS_PLACES: tl.constexpr, HAS_INITIAL: tl.constexpr):
    """The place of slot ``slot`` (scalars, int64), -1 outside of the row."""
    inside = (slot >= 0) & (slot < slots)
    if HAS_PLACES:
        place = tl.load(places + b * slots + slot, mask=inside, other=-1).to(tl.int64)
    else:
        past = -1
        if HAS_INITIAL:
            past = -2 - (b * (W - 1) + slot)
        place = tl.where(slot >= W - 1, slot - (W - 1), past)
        place = tl.where(inside, place, -1)
    return place


@triton.jit
def read_input(place, x, x_t, c_x, initial, C, c, c_ok, HAS_INITIAL: tl.constexpr):
    """The input at a place, (BLOCK_C,), in the dtype of x (fp32 with an initial state, whose dtype may differ).

    ``x`` points to the row of the batch; ``c_x`` are the channels' offsets in x.
    """
    at = place + tl.zeros_like(c)  # masks by block: the interpreter mistakes the type of a spread scalar comparison
    value = tl.load(x + place * x_t + c_x, mask=c_ok & (at >= 0), other=0)
    if HAS_INITIAL:
        past = tl.load(initial - (place + 2) * C + c, mask=c_ok & (at <= -2), other=0)
        value = value.to(tl.float32) + past.to(tl.float32)
    return value


@triton.jit
def read_taps(weight, weight_c, weight_w, c, c_ok, W: tl.constexpr):
    """W vectors, the token's own tap first: taps[w] belongs to the input w slots before."""
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.load(weight + c * weight_c + (W - 1 - w) * weight_w, mask=c_ok, other=0).to(tl.float32),)
    return taps


@triton.jit
def push(ring, newest, N: tl.constexpr):
    """The last N values, newest first."""
    result = (newest,)
    for i in tl.static_range(N - 1):
        result = result + (ring[i],)
    return result
