# mypy: ignore-errors
"""dphi of one segment and its part of dS, dz, from a state in memory: for long sequences.

q (B, G H_kv, T, D), do (B, G H_kv, T, FLOWS V) strided; state (N, H_kv FLOWS, K V + K) and partial (segments, N,
H_kv FLOWS, K V + K) contiguous fp32; dq (FLOWS, B, G H_kv, T, D), see memory. Grid: N H_kv FLOWS segments.
With a map, parts to be summed: d_table (segments, N, H_kv FLOWS, G, 2, F), d_token (FLOWS, B, G H_kv, T),
d_constant (segments, N, H_kv FLOWS), contiguous fp32; d_table is not written where a segment has no token.
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import as_operand, pair, remainder
from linattn.kernels.bidirectional.device.features import head_of
from linattn.kernels.bidirectional.device.memory import (
    head_start,
    load_state_transposed,
    load_vector,
    segment_of,
    store_state,
    store_vector,
)
from linattn.kernels.bidirectional.device.query_walk import walk_queries


@triton.jit(do_not_specialize=["T", "N", "B", "H_kv", "G", "segments", "eps"])
def bidirectional_query_grad(
    q, do, state, cu_seqlens, dq, partial, table_q, token_q, constant_q, d_table_q, d_token_q, d_constant_q,
    q_b, q_h, q_t, q_d, do_b, do_h, do_t, do_d,
    table_q_b, table_q_h, table_q_g, table_q_f, token_q_b, token_q_h, token_q_g, token_q_t,
    N, B, H_kv, G, T, segments, eps,
    NORM: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr, MAP_Q: tl.constexpr, TOKEN_Q: tl.constexpr,
    LEARN_Q: tl.constexpr, CONSTANT: tl.constexpr, FLOWS: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    F: tl.constexpr = K - CONSTANT
    P: tl.constexpr = F // PARTS
    TURNED: tl.constexpr = MAP_Q >= 0
    pid = tl.program_id(0)
    segment, row = pid % segments, (pid // segments).to(tl.int64)
    n, h, f = head_of(row, H_kv, FLOWS)
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    state += row * (K * V + K)
    S = load_state_transposed(state, P, V, BK, BV)
    z = load_vector(state + K * V, P, BK)
    high, low, zs = as_operand(S, BF16, IEEE), remainder(S, BF16, IEEE), pair(z, BF16, IEEE)
    high2, low2, z2 = high, low, z
    if PARTS == 2:
        S2 = load_state_transposed(state + P * V, P, V, BK, BV)
        z2 = load_vector(state + K * V + P, P, BK)
        high2, low2 = as_operand(S2, BF16, IEEE), remainder(S2, BF16, IEEE)
    output = ((f * B + b) * H_kv + h) * G
    place = segment.to(tl.int64) * N * H_kv * FLOWS + row
    q += b * q_b + h * G * q_h
    do += b * do_b + h * G * do_h + f * V * do_d
    dq += head_start(output, f * B + b, H_kv * G, T, D, BY_TOKEN)
    dq_h, dq_t = (D, H_kv * G * D) if BY_TOKEN else (tl.cast(T, tl.int64) * D, D)
    d_token_q += output * T
    d_table_q += place * G * 2 * F
    table_q += b * table_q_b + h * table_q_h + f * table_q_f
    token_q += b * token_q_b + h * token_q_h
    c_q, last, z_last = 0.0, tl.zeros((BV,), tl.float32), 0.0
    if CONSTANT:
        c_q, last, z_last = tl.load(constant_q), load_vector(state + F * V, V, BV), tl.load(state + K * V + F)
    dS, dS2, dz, dz2, d_row, d_count, d_c = walk_queries(
        q, do, dq, table_q, token_q, d_table_q, d_token_q, (high, low, high2, low2, z, z2, zs), (c_q, last, z_last),
        q_h, q_t, q_d, do_h, do_t, do_d, dq_h, dq_t, table_q_g, token_q_g, token_q_t, G, T, first, end, eps,
        NORM, GROUPED, MAP_Q, TOKEN_Q, LEARN_Q, CONSTANT, PARTS, TURNED, SPLIT, F, D, V, BT, BK, BV,
    )  # fmt: skip
    partial += place * (K * V + K)
    store_state(partial, dS, dz, 0, TURNED, K, P, V, BK, BV)
    if PARTS == 2:
        store_state(partial, dS2, dz2, P, TURNED, K, P, V, BK, BV)
    if CONSTANT:
        store_vector(partial + F * V, d_row, V, BV)
        tl.store(partial + K * V + F, d_count)
        tl.store(d_constant_q + place, d_c)
