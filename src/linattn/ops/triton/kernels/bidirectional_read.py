# mypy: ignore-errors
"""o_t = phi_t S / n_t for the queries of one segment, from a state in memory: for long sequences.

q (B, G H_kv, T, D) strided; state (N, H_kv FLOWS, K V + K) contiguous fp32; o (B, G H_kv, T, FLOWS V) contiguous.
Grid: N H_kv FLOWS segments, times tiles of V: a program holds S (BK, BV) while it walks the queries of its group.
Features: see bidirectional_features.
"""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.bidirectional_common import (
    as_operand,
    denominator,
    inverse_norm,
    load_vector,
    pair,
    remainder,
    segment_of,
    times_wide,
)
from linattn.ops.triton.kernels.bidirectional_features import contracted, counting, head_of, load_mapped
from linattn.ops.triton.kernels.maps import has_table, load_table


@triton.jit(do_not_specialize=["T", "H_kv", "G", "segments", "eps"])
def bidirectional_read(
    q, state, o, cu_seqlens, table_q, token_q, constant_q, q_b, q_h, q_t, q_d,
    table_q_b, table_q_h, table_q_g, table_q_f, token_q_b, token_q_h, token_q_g, token_q_t,
    H_kv, G, T, segments, eps,
    NORM: tl.constexpr, PACKED: tl.constexpr, MAP_Q: tl.constexpr, TOKEN_Q: tl.constexpr, CONSTANT: tl.constexpr,
    FLOWS: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    F: tl.constexpr = K - CONSTANT
    P: tl.constexpr = F // PARTS
    SUM_QUERIES: tl.constexpr = IEEE or MAP_Q >= 0
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    tile_v, rest = pid % TILES, pid // TILES
    segment, row = rest % segments, (rest // segments).to(tl.int64)
    n, h, f = head_of(row, H_kv, FLOWS)
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    state += row * (K * V + K)
    feature, column = tl.arange(0, BK), tile_v * BV + tl.arange(0, BV)
    inside = (feature < P)[:, None] & (column < V)[None, :]
    S = tl.load(state + feature[:, None] * V + column[None, :], mask=inside, other=0.0)
    z = load_vector(state + K * V, P, BK)
    z2 = z
    high, low, zs = as_operand(S, BF16, IEEE), remainder(S, BF16, IEEE), pair(z, BF16, IEEE)
    if PARTS == 2:
        S2 = tl.load(state + P * V + feature[:, None] * V + column[None, :], mask=inside, other=0.0)
        z2 = load_vector(state + K * V + P, P, BK)
        high2, low2 = as_operand(S2, BF16, IEEE), remainder(S2, BF16, IEEE)
    if CONSTANT:
        c_q = tl.load(constant_q)
        last = c_q * tl.load(state + F * V + column, mask=column < V, other=0.0)
        z_last = c_q * tl.load(state + K * V + F)
    q += b * q_b + h * G * q_h
    o += (b * H_kv + h) * G * T * FLOWS * V + f * V
    table_q += b * table_q_b + h * table_q_h + f * table_q_f
    token_q += b * token_q_b + h * token_q_h
    tiles = tl.cdiv(tl.maximum(end - first, 0), BT)
    steps = tl.arange(0, BT)
    # Heads of the group in a loop of their own where each has a table, which is then read once.
    NESTED: tl.constexpr = has_table(MAP_Q)
    for outer in range(0, G if NESTED else 1):
        params = load_table(table_q + tl.cast(outer, tl.int64) * table_q_g, MAP_Q, D, BK)
        for i in range(0, tiles if NESTED else G * tiles):
            g, t = tl.cast(outer + i // tiles, tl.int64), first + (i % tiles) * BT
            valid = t + steps < end
            queries, queries2, tile = load_mapped(
                q + g * q_h,
                t,
                valid,
                q_t,
                q_d,
                params,
                token_q + g * token_q_g,
                token_q_t,
                MAP_Q,
                TOKEN_Q,
                False,
                D,
                BT,
                BK,
            )
            out = times_wide(queries, high, tl.zeros((BT, BV), tl.float32), IEEE)
            if PARTS == 2:
                out = times_wide(queries2, high2, out, IEEE)
            if SPLIT and not IEEE:
                out = times_wide(queries, low, out, IEEE)
                if PARTS == 2:
                    out = times_wide(queries2, low2, out, IEEE)
            if CONSTANT:
                out += last[None, :]
            if NORM != 0:
                if SUM_QUERIES:
                    at = counting(tile, z[None, :], z2[None, :], MAP_Q)
                    den = contracted(queries, queries2, tile, at, z2[None, :], MAP_Q, PARTS)
                else:
                    den = denominator(queries, zs, BT)
                if CONSTANT:
                    den += z_last
                out *= inverse_norm(den, valid, eps, NORM)[:, None]
            rows = o + (g * T + t) * FLOWS * V + steps[:, None] * FLOWS * V + column[None, :]
            tl.store(rows, out.to(o.dtype.element_ty), mask=valid[:, None] & (column < V)[None, :])
