# mypy: ignore-errors
"""What the log decays do inside each chunk, ready for the sweeps.

With f the sum of a chunk's log decays up to and with the token (EXCLUSIVE: without it) and total that of the chunk:

    a      (B, HS, T) log decay, any strides (0 where all tokens share one)
    gates  (3 or 4, B, HS, T) fp32: f; exp(f); exp(total - f); with SPLIT what fp32 cuts off f. A last plane, of the
           weights of keys, is not written here
    keeps  (rows, chunks) fp32: exp(total). Chunk j of packed sequence n, which starts at token s, lies at
           s // L + n + j: every chunk has a place of its own and nobody needs to count them

Sums are fp64: a difference of two long fp32 sums keeps no digits. Done here, once, and not in every sweep, whose
registers are full.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "HS", "blocks", "chunks", "plane"])
def potentials(
    a, a_b, a_h, a_t, gates, plane, keeps, cu, T, HS, blocks, chunks,
    L: tl.constexpr, CHUNKS: tl.constexpr, EXCLUSIVE: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
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
    t = first + j[:, None] * L + tl.arange(0, L)[None, :]
    ok = t < last
    value = tl.load(a + b * a_b + hs * a_h + t * a_t, mask=ok, other=0.0).to(tl.float64)
    sums = tl.cumsum(value, axis=1)
    whole = tl.sum(value, axis=1)
    if EXCLUSIVE:
        sums = sums - value
    short = sums.to(tl.float32)
    p = gates + (b * HS + hs) * T + t
    tl.store(p, short, mask=ok)
    tl.store(p + plane, tl.exp(short), mask=ok)
    tl.store(p + 2 * plane, tl.exp((whole[:, None] - sums).to(tl.float32)), mask=ok)
    if SPLIT:
        tl.store(p + 3 * plane, (sums - short.to(tl.float64)).to(tl.float32), mask=ok)
    high = whole.to(tl.float32)
    kept = tl.exp(high) * (1.0 + (whole - high.to(tl.float64)).to(tl.float32))
    tl.store(keeps + chunk0 + j, kept, mask=first + j * L < last)
