# mypy: ignore-errors
"""o_t = phi_t S / n_t for the queries of one segment, from a state in memory: for long sequences.

q (B, G H_kv, T, K) strided; state (N, H_kv, K V + K) contiguous fp32; o (B, G H_kv, T, V) contiguous.
Grid: N H_kv segments, times tiles of V: a program holds S (BK, BV) while it walks the queries of its group.
"""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.bidirectional_common import (
    NARROW,
    as_operand,
    inverse_norm,
    load_rows,
    load_state_keys,
    pair,
    remainder,
    segment_of,
    times_wide,
)


@triton.jit(do_not_specialize=["T", "H_kv", "G", "segments", "eps"])
def bidirectional_read(
    q, state, o, cu_seqlens, q_b, q_h, q_t, q_d, H_kv, G, T, segments, eps,
    NORM: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    tile, rest = pid % TILES, pid // TILES
    segment, row = rest % segments, (rest // segments).to(tl.int64)
    n, h = row // H_kv, row % H_kv
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    state += row * (K * V + K)
    feature, column = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    S = tl.load(
        state + feature[:, None] * V + column[None, :], mask=(feature < K)[:, None] & (column < V)[None, :], other=0.0
    )
    high, low = as_operand(S, BF16), remainder(S, BF16)
    zs = pair(load_state_keys(state, K, V, BK), BF16)
    q += b * q_b + h * G * q_h
    o += (b * H_kv + h) * G * T * V
    tiles = tl.cdiv(tl.maximum(end - first, 0), BT)
    steps = tl.arange(0, BT)
    for i in range(0, G * tiles):
        g, t = tl.cast(i // tiles, tl.int64), first + (i % tiles) * BT
        valid = t + steps < end
        queries = load_rows(q + g * q_h, t, valid, q_t, q_d, K, BT, BK)
        out = times_wide(queries, high, tl.zeros((BT, BV), tl.float32), IEEE)
        if SPLIT and BF16:
            out = times_wide(queries, low, out, IEEE)
        if NORM != 0:
            den = tl.sum(times_wide(queries, zs, tl.zeros((BT, NARROW), tl.float32), IEEE), 1)
            out *= inverse_norm(den, valid, eps, NORM)[:, None]
        rows = o + (g * T + t) * V + steps[:, None] * V + column[None, :]
        tl.store(rows, out.to(o.dtype.element_ty), mask=valid[:, None] & (column < V)[None, :])
