# mypy: ignore-errors
# ruff: noqa: SIM108 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""dphi of one segment and its part of dS, dz, from a state in memory: for long sequences.

With u_t = S do_t:  r_t = (phi_t . u_t) / n_t * dn/dden,  dphi_t = (u_t - r_t z) / n_t,  delta_t = - r_t / n_t,
                    dS = sum_t phi_t (do_t / n_t)^T,  dz = sum_t delta_t phi_t

q (B, G H_kv, T, D), do (B, G H_kv, T, FLOWS V) strided; state (N, H_kv FLOWS, K V + K) and partial (segments, N,
H_kv FLOWS, K V + K) contiguous fp32; dq (FLOWS, B, G H_kv, T, D) contiguous. Grid: N H_kv FLOWS segments.
With a map, parts to be summed: d_table (segments, N, H_kv FLOWS, G, 2, F), d_token (FLOWS, B, G H_kv, T),
d_constant (segments, N, H_kv FLOWS), contiguous fp32; d_table is not written where a segment has no token.
"""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.bidirectional_common import (
    add_weighted,
    as_operand,
    denominator,
    from_state,
    inverse_norm,
    load_rows,
    load_state_transposed,
    load_vector,
    norm_slope,
    pair,
    remainder,
    segment_of,
    store_rows,
    store_state,
    store_vector,
)
from linattn.ops.triton.kernels.bidirectional_features import (
    FOLD,
    contracted,
    counting,
    folded,
    head_of,
    load_mapped,
    over_tokens,
    paired,
    store_mapped_grad,
)
from linattn.ops.triton.kernels.maps import has_table, is_short, load_table, one_sided
from linattn.ops.triton.kernels.maps_grad import store_table_grad, table_terms


@triton.jit(do_not_specialize=["T", "N", "B", "H_kv", "G", "segments", "eps"])
def bidirectional_query_grad(
    q, do, state, cu_seqlens, dq, partial, table_q, token_q, constant_q, d_table_q, d_token_q, d_constant_q,
    q_b, q_h, q_t, q_d, do_b, do_h, do_t, do_d,
    table_q_b, table_q_h, table_q_g, table_q_f, token_q_b, token_q_h, token_q_g, token_q_t,
    N, B, H_kv, G, T, segments, eps,
    NORM: tl.constexpr, PACKED: tl.constexpr, MAP_Q: tl.constexpr, TOKEN_Q: tl.constexpr, LEARN_Q: tl.constexpr,
    CONSTANT: tl.constexpr, FLOWS: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    SHORT: tl.constexpr = is_short(q.dtype.element_ty)
    F: tl.constexpr = K - CONSTANT
    P: tl.constexpr = F // PARTS
    TURNED: tl.constexpr = MAP_Q >= 0
    SUM_QUERIES: tl.constexpr = IEEE or MAP_Q >= 0
    pid = tl.program_id(0)
    segment, row = pid % segments, (pid // segments).to(tl.int64)
    n, h, f = head_of(row, H_kv, FLOWS)
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    state += row * (K * V + K)
    S = load_state_transposed(state, P, V, BK, BV)
    z = load_vector(state + K * V, P, BK)
    z2 = z
    high, low, zs = as_operand(S, BF16, IEEE), remainder(S, BF16, IEEE), pair(z, BF16, IEEE)
    if PARTS == 2:
        S2 = load_state_transposed(state + P * V, P, V, BK, BV)
        z2 = load_vector(state + K * V + P, P, BK)
        high2, low2 = as_operand(S2, BF16, IEEE), remainder(S2, BF16, IEEE)
    head = ((f * B + b) * H_kv + h) * G
    place = segment.to(tl.int64) * N * H_kv * FLOWS + row
    q += b * q_b + h * G * q_h
    do += b * do_b + h * G * do_h + f * V * do_d
    dq += head * T * D
    d_token_q += head * T
    d_table_q += place * G * 2 * F
    table_q += b * table_q_b + h * table_q_h + f * table_q_f
    token_q += b * token_q_b + h * token_q_h
    if CONSTANT:
        c_q, last, z_last = tl.load(constant_q), load_vector(state + F * V, V, BV), tl.load(state + K * V + F)
        d_last, dz_last = tl.zeros((FOLD, BV), tl.float32), tl.zeros((BT,), tl.float32)
        d_c = tl.zeros((BT,), tl.float32)
    dS = tl.zeros((BV, BK) if TURNED else (BK, BV), tl.float32)
    dS2 = dS
    # Not a dot: narrow products with operands made in the loop came out wrong on Hopper (Triton 3.6).
    dZ, dz_rows = tl.zeros((BT, BK), tl.float32), tl.zeros((BT // 16, 8, BK), tl.float32)
    dz2_rows = dz_rows
    tiles = tl.cdiv(tl.maximum(end - first, 0), BT)
    # Heads of the group in a loop of their own where each has a table, which is then read once.
    NESTED: tl.constexpr = has_table(MAP_Q)
    for outer in range(0, G if NESTED else 1):
        params = load_table(table_q + tl.cast(outer, tl.int64) * table_q_g, MAP_Q, D, BK)
        a_rows = tl.zeros((BT // 16, 8, BK), tl.float32)
        b_rows = a_rows
        for i in range(0, tiles if NESTED else G * tiles):
            g, t = tl.cast(outer + i // tiles, tl.int64), first + (i % tiles) * BT
            valid = t + tl.arange(0, BT) < end
            queries, queries2, tile = load_mapped(
                q + g * q_h, t, valid, q_t, q_d, params, token_q + g * token_q_g, token_q_t,
                MAP_Q, TOKEN_Q, MAP_Q >= 0, D, BT, BK,
            )  # fmt: skip
            grads = load_rows(do + g * do_h, t, valid, do_t, do_d, V, BT, BV)
            if BF16:
                grads = grads.to(tl.bfloat16)
            else:
                grads = grads.to(tl.float32)
            scale = tl.full((BT,), 1.0, tl.float32)
            at = counting(tile, z[None, :], z2[None, :], MAP_Q)
            if NORM != 0:
                if SUM_QUERIES:
                    den = contracted(queries, queries2, tile, at, z2[None, :], MAP_Q, PARTS)
                else:
                    den = denominator(queries, zs, BT)
                if CONSTANT:
                    den += c_q * z_last
                scale = inverse_norm(den, valid, eps, NORM)
            dS = add_weighted(queries, grads, scale, dS, NORM, TURNED, BF16, IEEE)
            u = from_state(grads, high, low, SPLIT, IEEE, BT, BK)
            u2 = u
            if PARTS == 2:
                dS2 = add_weighted(queries2, grads, scale, dS2, NORM, TURNED, BF16, IEEE)
                u2 = from_state(grads, high2, low2, SPLIT, IEEE, BT, BK)
                u = counting(tile, u, u2, MAP_Q)
            if CONSTANT:
                u_last = tl.sum(grads.to(tl.float32) * last[None, :], 1)
                d_last += folded(grads.to(tl.float32) * scale[:, None], BT, BV)
            if NORM != 0:
                ratio = contracted(queries, queries2, tile, u, u2, MAP_Q, PARTS)
                if CONSTANT:
                    ratio += c_q * u_last
                ratio *= scale * norm_slope(den, NORM)
                u = (u - ratio[:, None] * at) * scale[:, None]
                if PARTS == 2 and not one_sided(MAP_Q):
                    u2 = (u2 - ratio[:, None] * z2[None, :]) * scale[:, None]
                weight = (ratio * scale)[:, None]
                if MAP_Q < 0:
                    dZ -= queries.to(tl.float32) * weight
                else:
                    dz_rows -= paired(queries.to(tl.float32) * weight, BT, BK)
                    if PARTS == 2:
                        dz2_rows -= paired(queries2.to(tl.float32) * weight, BT, BK)
                if CONSTANT:
                    u_last = (u_last - ratio * z_last) * scale
                    dz_last -= ratio * scale
            if CONSTANT:
                d_c += u_last
            if MAP_Q < 0:
                store_rows(dq + g * T * D, t, valid, D, u, D, BT, BK)
            else:
                u, u2 = store_mapped_grad(
                    tile, t, valid, valid, params, token_q + g * token_q_g, token_q_t, u, u2,
                    dq + g * T * D, d_token_q + g * T, MAP_Q, TOKEN_Q, D, BT, BK,
                )  # fmt: skip
                if LEARN_Q:
                    to_a, to_b = table_terms(tile[0], tile[1], tile[3], u, u2, params, MAP_Q, SHORT, BT, BK)
                    a_rows, b_rows = a_rows + paired(to_a, BT, BK), b_rows + paired(to_b, BT, BK)
        if LEARN_Q:
            into = d_table_q + tl.cast(outer, tl.int64) * 2 * F
            store_table_grad(into, over_tokens(a_rows, BT, BK), over_tokens(b_rows, BT, BK), params, MAP_Q, D, BK)
    partial += place * (K * V + K)
    dz = tl.sum(dZ, 0) if MAP_Q < 0 else over_tokens(dz_rows, BT, BK)
    store_state(partial, dS, dz, 0, TURNED, K, P, V, BK, BV)
    if PARTS == 2:
        store_state(partial, dS2, over_tokens(dz2_rows, BT, BK), P, TURNED, K, P, V, BK, BV)
    if CONSTANT:
        store_vector(partial + F * V, c_q * tl.sum(d_last, 0), V, BV)
        tl.store(partial + K * V + F, c_q * tl.sum(dz_last, 0))
        tl.store(d_constant_q + place, tl.sum(d_c, 0))
