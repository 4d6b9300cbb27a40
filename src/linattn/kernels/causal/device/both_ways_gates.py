# mypy: ignore-errors
"""Sums of log decays inside each chunk, for both directions at once, in units of log 2.

    a       (B, HS, T) log decay <= 0, any strides (0 where all tokens share one)
    gates   (2, places, L) fp32: f, the sum that weighs what comes from before a token, and b, of what comes after it
    totals  (places,) fp32: the sum of the whole chunk

A pair's weight is exp2(f_i - f_j) where key j is at or before i and exp2(b_j - b_i) where it is after. f counts the
token itself and b does not; with KEY_INDEX b does and f does not. Tokens beyond the end decay nothing: every number of
a chunk is written, and nobody needs a mask to read it. Chunk j of row r lies at place r chunks + j; of packed sequence
n, which starts at token s, at s // L + n + j.
"""

import triton
import triton.language as tl

# 2**-160 is 0 in fp32, and sums of such numbers over a chunk still have digits behind the point.
STRONGEST: tl.constexpr = tl.constexpr(-160.0)


@triton.jit(do_not_specialize=["T", "HS", "blocks", "chunks", "plane"])
def gates_both_ways(
    a, a_b, a_h, a_t, gates, plane, totals, cu, T, HS, blocks, chunks,
    L: tl.constexpr, CHUNKS: tl.constexpr, KEY_INDEX: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    # A program has CHUNKS chunks of one sequence and head.
    pid = tl.program_id(0).to(tl.int64)
    block = pid % blocks
    pid = pid // blocks
    hs = pid % HS
    n = pid // HS
    if PACKED:
        b = n * 0
        first = tl.load(cu + n).to(tl.int64)
        last = tl.load(cu + n + 1).to(tl.int64)
        chunk0 = hs * chunks + first // L + n
    else:
        b = n
        first = n * 0
        last = first + T
        chunk0 = (n * HS + hs) * chunks
    j = block * CHUNKS + tl.arange(0, CHUNKS)
    there = first + j * L < last
    i = tl.arange(0, L)
    t = first + j[:, None] * L + i[None, :]
    value = tl.load(a + b * a_b + hs * a_h + t * a_t, mask=t < last, other=0.0)
    value = tl.maximum(value * 1.4426950408889634, STRONGEST)
    with_own = tl.cumsum(value, axis=1)
    without = with_own - value
    p = gates + (chunk0 + j[:, None]) * L + i[None, :]
    tl.store(p, without if KEY_INDEX else with_own, mask=there[:, None])
    tl.store(p + plane, with_own if KEY_INDEX else without, mask=there[:, None])
    # The last sum itself: a sum in another order could be above it, and a weight above 1.
    total = tl.sum(tl.where((i == L - 1)[None, :], with_own, 0.0), axis=1)
    tl.store(totals + chunk0 + j, total, mask=there)
