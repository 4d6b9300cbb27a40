# mypy: ignore-errors
"""dpsi_s = dS v_s + dz and dv_s = dS^T psi_s for the keys of one segment: for long sequences.

k (B, H_kv, T, D), v (B, H_kv, T, FLOWS V) strided; d_state (N, H_kv FLOWS, K V + K) contiguous fp32; mask (B, T) uint8;
dk (FLOWS, B, H_kv, T, D), dv (B, H_kv, T, FLOWS V) contiguous. Grid: N H_kv FLOWS segments.
With a map, parts to be summed: d_table (segments, N, H_kv FLOWS, 2, F), d_token (FLOWS, B, H_kv, T), d_constant
(segments, N, H_kv FLOWS), contiguous fp32. Features: see bidirectional_features.
"""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.bidirectional_common import (
    as_operand,
    key_grads,
    load_rows,
    load_state_as,
    load_vector,
    remainder,
    segment_of,
    store_rows,
    visible,
)
from linattn.ops.triton.kernels.bidirectional_features import (
    counting,
    head_of,
    load_mapped,
    over_tokens,
    paired,
    store_mapped_grad,
)
from linattn.ops.triton.kernels.maps import is_short, load_table
from linattn.ops.triton.kernels.maps_grad import store_table_grad, table_terms


@triton.jit(do_not_specialize=["T", "N", "B", "H_kv", "segments"])
def bidirectional_key_grad(
    k, v, d_state, mask, cu_seqlens, dk, dv, table_k, token_k, constant_k, d_table_k, d_token_k, d_constant_k,
    k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, mask_b, mask_t,
    table_k_b, table_k_h, table_k_f, token_k_b, token_k_h, token_k_t, N, B, H_kv, T, segments,
    HAS_MASK: tl.constexpr, PACKED: tl.constexpr, MAP_K: tl.constexpr, TOKEN_K: tl.constexpr, LEARN_K: tl.constexpr,
    CONSTANT: tl.constexpr, FLOWS: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = k.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = k.dtype.element_ty == tl.float32
    SHORT: tl.constexpr = is_short(k.dtype.element_ty)
    F: tl.constexpr = K - CONSTANT
    P: tl.constexpr = F // PARTS
    TURNED: tl.constexpr = MAP_K >= 0
    pid = tl.program_id(0)
    segment, row = pid % segments, (pid // segments).to(tl.int64)
    n, h, f = head_of(row, H_kv, FLOWS)
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    d_state += row * (K * V + K)
    dS = load_state_as(d_state, TURNED, P, V, BK, BV)
    dz = load_vector(d_state + K * V, P, BK)
    high, low = as_operand(dS, BF16, IEEE), remainder(dS, BF16, IEEE)
    if PARTS == 2:
        dS2 = load_state_as(d_state + P * V, TURNED, P, V, BK, BV)
        dz2 = load_vector(d_state + K * V + P, P, BK)
        high2, low2 = as_operand(dS2, BF16, IEEE), remainder(dS2, BF16, IEEE)
    place = segment.to(tl.int64) * N * H_kv * FLOWS + row
    head = (f * B + b) * H_kv + h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h + f * V * v_d
    mask += b * mask_b
    table_k += b * table_k_b + h * table_k_h + f * table_k_f
    token_k += b * token_k_b + h * token_k_h
    dk += head * T * D
    dv += (b * H_kv + h) * T * FLOWS * V + f * V
    d_token_k += head * T
    if CONSTANT:
        c_k, d_last = tl.load(constant_k), load_vector(d_state + F * V, V, BV)
        dz_last, d_c = tl.load(d_state + K * V + F), tl.zeros((BT,), tl.float32)
    a_rows = tl.zeros((BT // 16, 8, BK), tl.float32)
    b_rows = a_rows
    params = load_table(table_k, MAP_K, D, BK)
    for t in range(first, end, BT):
        keep = visible(mask, t, end, mask_t, HAS_MASK, BT)
        exists = t + tl.arange(0, BT) < end
        keys, keys2, tile = load_mapped(
            k, t, keep, k_t, k_d, params, token_k, token_k_t, MAP_K, TOKEN_K, False, D, BT, BK
        )
        values = load_rows(v, t, keep, v_t, v_d, V, BT, BV)
        d_keys, d_values = key_grads(keys, values, high, low, TURNED, SPLIT, IEEE, BT, BK, BV)
        d_keys += dz[None, :]
        d_keys2 = d_keys
        if PARTS == 2:
            d_keys2, more = key_grads(keys2, values, high2, low2, TURNED, SPLIT, IEEE, BT, BK, BV)
            d_keys2 += dz2[None, :]
            d_values += more
        if CONSTANT:
            d_c += tl.where(keep, tl.sum(values.to(tl.float32) * d_last[None, :], 1) + dz_last, 0.0)
            d_values += tl.where(keep[:, None], c_k * d_last[None, :], 0.0)
        if MAP_K < 0:
            if HAS_MASK:
                d_keys = tl.where(keep[:, None], d_keys, 0.0)
            store_rows(dk, t, exists, D, d_keys, D, BT, BK)
        else:
            grad, grad2 = store_mapped_grad(
                tile, t, keep, exists, params, token_k, token_k_t, counting(tile, d_keys, d_keys2, MAP_K), d_keys2,
                dk, d_token_k, MAP_K, TOKEN_K, D, BT, BK,
            )  # fmt: skip
            if LEARN_K:
                to_a, to_b = table_terms(tile[0], tile[1], tile[3], grad, grad2, params, MAP_K, SHORT, BT, BK)
                a_rows, b_rows = a_rows + paired(to_a, BT, BK), b_rows + paired(to_b, BT, BK)
        store_rows(dv, t, exists, FLOWS * V, d_values, V, BT, BV)
    if LEARN_K:
        into = d_table_k + place * 2 * F
        store_table_grad(into, over_tokens(a_rows, BT, BK), over_tokens(b_rows, BT, BK), params, MAP_K, D, BK)
    if CONSTANT:
        tl.store(d_constant_k + place, tl.sum(d_c, 0))
