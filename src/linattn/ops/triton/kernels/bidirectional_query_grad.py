# mypy: ignore-errors
# ruff: noqa: SIM108 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""dphi of one segment and its part of dS, dz, from a state in memory: for long sequences.

With u_t = S do_t:  delta_t = - (phi_t . u_t) / n_t^2 * dn/dden,  dphi_t = u_t / n_t + delta_t z,
                    dS = sum_t phi_t (do_t / n_t)^T,  dz = sum_t delta_t phi_t

q (B, G H_kv, T, K), do (B, G H_kv, T, V) strided; state (N, H_kv, K V + K) and partial (segments, N, H_kv, K V + K)
contiguous fp32; dq contiguous. Grid: N H_kv segments.
"""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.bidirectional_common import (
    NARROW,
    as_operand,
    inverse_norm,
    load_rows,
    load_state_keys,
    load_state_transposed,
    norm_slope,
    pair,
    remainder,
    segment_of,
    store_rows,
    store_state,
    times_wide,
)


@triton.jit(do_not_specialize=["T", "N", "H_kv", "G", "segments", "eps"])
def bidirectional_query_grad(
    q, do, state, cu_seqlens, dq, partial,
    q_b, q_h, q_t, q_d, do_b, do_h, do_t, do_d, N, H_kv, G, T, segments, eps,
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
    S_t = load_state_transposed(state, K, V, BK, BV)
    z = load_state_keys(state, K, V, BK)
    high, low, zs = as_operand(S_t, BF16), remainder(S_t, BF16), pair(z, BF16)
    q += b * q_b + h * G * q_h
    do += b * do_b + h * G * do_h
    dq += (b * H_kv + h) * G * T * K
    dS = tl.zeros((BK, BV), tl.float32)
    # Not a dot: narrow products with operands made in the loop came out wrong on Hopper (Triton 3.6).
    dZ = tl.zeros((BT, BK), tl.float32)
    tiles = tl.cdiv(tl.maximum(end - first, 0), BT)
    for i in range(0, G * tiles):
        g, t = tl.cast(i // tiles, tl.int64), first + (i % tiles) * BT
        valid = t + tl.arange(0, BT) < end
        queries = load_rows(q + g * q_h, t, valid, q_t, q_d, K, BT, BK)
        grads = load_rows(do + g * do_h, t, valid, do_t, do_d, V, BT, BV)
        if BF16:
            grads = grads.to(tl.bfloat16)
        else:
            grads = grads.to(tl.float32)
        weighted = grads
        if NORM != 0:
            den = tl.sum(times_wide(queries, zs, tl.zeros((BT, NARROW), tl.float32), IEEE), 1)
            scale = inverse_norm(den, valid, eps, NORM)
            weighted = as_operand(grads.to(tl.float32) * scale[:, None], BF16)
        dS = times_wide(tl.trans(queries), weighted, dS, IEEE)
        u = times_wide(grads, high, tl.zeros((BT, BK), tl.float32), IEEE)
        if SPLIT and BF16:
            u = times_wide(grads, low, u, IEEE)
        if NORM != 0:
            delta = -tl.sum(queries.to(tl.float32) * u, 1) * scale * scale * norm_slope(den, NORM)
            u = u * scale[:, None] + delta[:, None] * z[None, :]
            dZ += queries.to(tl.float32) * delta[:, None]
        store_rows(dq + g * T * K, t, valid, K, u, K, BT, BK)
    partial += (segment.to(tl.int64) * N * H_kv + row) * (K * V + K)
    store_state(partial, dS, tl.sum(dZ, 0), K, V, BK, BV)
