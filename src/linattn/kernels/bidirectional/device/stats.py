# mypy: ignore-errors
"""Per query: scale = 1 / n and delta = - (do . phi S) / n^2 * dn/dden. First step of the backward of wide heads.

q (B, G H_kv, T, K), do (B, G H_kv, T, V) strided; state (N, H_kv, K V + K) contiguous fp32;
scale, delta (B, G H_kv, T) contiguous fp32. Grid: N H_kv segments. S is read in blocks of BV columns for each tile.
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import (
    as_operand,
    denominator,
    inverse_norm,
    norm_slope,
    pair,
    remainder,
    times_wide,
)
from linattn.kernels.bidirectional.device.memory import load_rows, load_vector, segment_of


@triton.jit(do_not_specialize=["T", "H_kv", "G", "segments", "eps"])
def bidirectional_stats(
    q, do, state, cu_seqlens, scale, delta,
    q_b, q_h, q_t, q_d, do_b, do_h, do_t, do_d, H_kv, G, T, segments, eps,
    NORM: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    pid = tl.program_id(0)
    segment, row = pid % segments, (pid // segments).to(tl.int64)
    n, h = row // H_kv, row % H_kv
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    state += row * (K * V + K)
    z = load_vector(state + K * V, K, BK)
    zs = pair(z, BF16, IEEE)
    q += b * q_b + h * G * q_h
    do += b * do_b + h * G * do_h
    scale += (b * H_kv + h) * G * T
    delta += (b * H_kv + h) * G * T
    tiles = tl.cdiv(tl.maximum(end - first, 0), BT)
    steps, feature = tl.arange(0, BT), tl.arange(0, BK)
    for i in range(0, G * tiles):
        g, t = tl.cast(i // tiles, tl.int64), first + (i % tiles) * BT
        valid = t + steps < end
        queries = load_rows(q + g * q_h, t, valid, q_t, q_d, K, BT, BK)
        den = tl.sum(queries * z[None, :], 1) if IEEE else denominator(queries, zs, BT)
        w = tl.zeros((BT,), tl.float32)
        for c in range(0, V, BV):
            column = c + tl.arange(0, BV)
            inside = (feature < K)[:, None] & (column < V)[None, :]
            S = tl.load(state + feature[:, None] * V + column[None, :], mask=inside, other=0.0)
            num = times_wide(queries, as_operand(S, BF16, IEEE), tl.zeros((BT, BV), tl.float32), IEEE)
            if SPLIT and not IEEE:
                num = times_wide(queries, remainder(S, BF16, IEEE), num, IEEE)
            rows = do + g * do_h + tl.cast(t, tl.int64) * do_t + steps[:, None] * do_t + column[None, :] * do_d
            grads = tl.load(rows, mask=valid[:, None] & (column < V)[None, :], other=0.0)
            w += tl.sum(num * grads.to(tl.float32), 1)
        s = inverse_norm(den, valid, eps, NORM)
        tl.store(scale + g * T + t + steps, s, mask=valid)
        tl.store(delta + g * T + t + steps, -w * s * s * norm_slope(den, NORM), mask=valid)
