# mypy: ignore-errors
"""Gradients of bidirectional attention, one key head and its query heads in one program: for short sequences.

S and z are computed again from k and v, which are then read a second time from the cache: this is cheaper than storing
S and z. With u_t = S do_t (numerators are not needed, since do_t . num_t = phi_t . u_t):

    r_t = (phi_t . u_t) / n_t * dn/dden,   dphi_t = (u_t - r_t z) / n_t,     delta_t = - r_t / n_t
    dS = d_state + sum_t phi_t (do_t / n_t)^T,   dz = d_state + sum_t delta_t phi_t
    dpsi_s = dS v_s + dz,                  dv_s = dS^T psi_s

Shapes as in forward; do (B, H, Tq, FLOWS V) strided; dq (FLOWS, B, H, Tq, D), dk (FLOWS, B, H_kv, Tk, D) and dv: see
memory; initial, d_state, d_initial (B, H_kv FLOWS, K V + K) contiguous fp32. Grid: B H_kv FLOWS.
With maps, parts to be summed: d_table_q (B, H_kv FLOWS, G, 2, F), d_table_k (B, H_kv FLOWS, 2, F), d_token_q (FLOWS, B,
H, Tq), d_token_k (FLOWS, B, H_kv, Tk), d_constant_q and _k (B, H_kv FLOWS), contiguous fp32; d_table_q is not written
where there is no query.
A transposed result of a dot must not be an operand of a dot. So from features that are loaded, dS is made, and dpsi as
a tile (BK, BT); from mapped features, which are results of a dot (see ``as_product``), dS^T, and dv as a tile (BV, BT).
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import (
    NARROW,
    as_operand,
    first_column,
    pair,
    remainder,
    times,
    times_exactly,
)
from linattn.kernels.bidirectional.device.features import FOLD, folded, head_of, load_mapped
from linattn.kernels.bidirectional.device.key_walk import walk_keys
from linattn.kernels.bidirectional.device.memory import (
    head_start,
    load_rows,
    load_state_as,
    load_state_transposed,
    load_vector,
    store_state,
    store_vector,
    visible,
)
from linattn.kernels.bidirectional.device.query_walk import walk_queries
from linattn.kernels.maps.device.functions import load_table


@triton.jit(do_not_specialize=["Tq", "Tk", "eps", "B", "H_kv", "G"])
def bidirectional_backward(
    q, k, v, do, mask, initial, d_state, dq, dk, dv, d_initial,
    table_q, token_q, constant_q, table_k, token_k, constant_k,
    d_table_q, d_token_q, d_constant_q, d_table_k, d_token_k, d_constant_k,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, do_b, do_h, do_t, do_d, mask_b, mask_t,
    table_q_b, table_q_h, table_q_g, table_q_f, token_q_b, token_q_h, token_q_g, token_q_t,
    table_k_b, table_k_h, table_k_f, token_k_b, token_k_h, token_k_t,
    B, H_kv, G, Tq, Tk, eps,
    NORM: tl.constexpr, HAS_MASK: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_D_STATE: tl.constexpr,
    GROUPED: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, TOKEN_Q: tl.constexpr, TOKEN_K: tl.constexpr,
    LEARN_Q: tl.constexpr, LEARN_K: tl.constexpr, CONSTANT: tl.constexpr, FLOWS: tl.constexpr, PARTS: tl.constexpr,
    SPLIT: tl.constexpr, BY_TOKEN_Q: tl.constexpr, BY_TOKEN_K: tl.constexpr, BY_TOKEN_V: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    F: tl.constexpr = K - CONSTANT
    P: tl.constexpr = F // PARTS
    TURNED: tl.constexpr = MAP_Q >= 0 or MAP_K >= 0
    SIZE: tl.constexpr = K * V + K
    # Made in the loop, features are summed in registers: see denominator.
    SUM_KEYS: tl.constexpr = IEEE or MAP_K >= 0
    row = tl.program_id(0).to(tl.int64)
    b, h, f = head_of(row, H_kv, FLOWS)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h + f * V * v_d
    mask += b * mask_b
    table_k += b * table_k_b + h * table_k_h + f * table_k_f
    token_k += b * token_k_b + h * token_k_h
    ones = first_column(BT, k.dtype.element_ty)
    S = tl.zeros((BV, BK), tl.float32)
    lost, S2, lost2 = S, S, S
    Z, z_rows = tl.zeros((BK, NARROW), tl.float32), tl.zeros((FOLD, BK), tl.float32)
    z2_rows = z_rows
    values_sum, counts = tl.zeros((BV, NARROW), tl.float32), tl.zeros((BT,), tl.float32)
    params = load_table(table_k, MAP_K, D, BK)
    for t in range(0, Tk, BT):
        keep = visible(mask, t, Tk, mask_t, HAS_MASK, BT)
        keys, keys2, _ = load_mapped(k, t, keep, k_t, k_d, params, token_k, token_k_t, MAP_K, TOKEN_K, False, D, BT, BK)
        values = load_rows(v, t, keep, v_t, v_d, V, BT, BV)
        S, lost = times_exactly(tl.trans(values), keys, S, lost, IEEE)
        if PARTS == 2:
            S2, lost2 = times_exactly(tl.trans(values), keys2, S2, lost2, IEEE)
        if NORM != 0:
            if SUM_KEYS:
                z_rows += folded(keys, BT, BK)
                if PARTS == 2:
                    z2_rows += folded(keys2, BT, BK)
            else:
                Z = times(tl.trans(keys), ones, Z)
        if CONSTANT:
            values_sum = times(tl.trans(values), ones, values_sum)
            counts += keep.to(tl.float32)
    z, z2 = tl.sum(z_rows, 0), tl.sum(z2_rows, 0)
    if not SUM_KEYS:
        z = tl.sum(Z, 1)
    if HAS_INITIAL:
        S += load_state_transposed(initial + row * SIZE, P, V, BK, BV)
        z += load_vector(initial + row * SIZE + K * V, P, BK)
        if PARTS == 2:
            S2 += load_state_transposed(initial + row * SIZE + P * V, P, V, BK, BV)
            z2 += load_vector(initial + row * SIZE + K * V + P, P, BK)
    c_q, c_k, last, z_last = 0.0, 0.0, tl.zeros((BV,), tl.float32), 0.0
    if CONSTANT:
        c_q, c_k = tl.load(constant_q), tl.load(constant_k)
        last, z_last = c_k * tl.sum(values_sum, 1), c_k * tl.sum(counts, 0)
        if HAS_INITIAL:
            last += load_vector(initial + row * SIZE + F * V, V, BV)
            z_last += tl.load(initial + row * SIZE + K * V + F)
    high, low, zs = as_operand(S, BF16, IEEE), remainder(S, BF16, IEEE), pair(z, BF16, IEEE)
    high2, low2 = as_operand(S2, BF16, IEEE), remainder(S2, BF16, IEEE)

    place = (f * B + b) * H_kv + h
    q += b * q_b + h * G * q_h
    do += b * do_b + h * G * do_h + f * V * do_d
    dq += head_start(place * G, f * B + b, H_kv * G, Tq, D, BY_TOKEN_Q)
    dq_h, dq_t = (D, H_kv * G * D) if BY_TOKEN_Q else (tl.cast(Tq, tl.int64) * D, D)
    d_token_q += place * G * Tq
    d_table_q += row * G * 2 * F
    table_q += b * table_q_b + h * table_q_h + f * table_q_f
    token_q += b * token_q_b + h * token_q_h
    dS, dS2, dz, dz2, d_row, d_count, d_c = walk_queries(
        q, do, dq, table_q, token_q, d_table_q, d_token_q, (high, low, high2, low2, z, z2, zs), (c_q, last, z_last),
        q_h, q_t, q_d, do_h, do_t, do_d, dq_h, dq_t, table_q_g, token_q_g, token_q_t, G, Tq, 0, Tq, eps,
        NORM, GROUPED, MAP_Q, TOKEN_Q, LEARN_Q, CONSTANT, PARTS, TURNED, SPLIT, F, D, V, BT, BK, BV,
    )  # fmt: skip
    if HAS_D_STATE:
        dS += load_state_as(d_state + row * SIZE, TURNED, P, V, BK, BV)
        dz += load_vector(d_state + row * SIZE + K * V, P, BK)
        if PARTS == 2:
            dS2 += load_state_as(d_state + row * SIZE + P * V, TURNED, P, V, BK, BV)
            dz2 += load_vector(d_state + row * SIZE + K * V + P, P, BK)
    if HAS_INITIAL:
        store_state(d_initial + row * SIZE, dS, dz, 0, TURNED, K, P, V, BK, BV)
        if PARTS == 2:
            store_state(d_initial + row * SIZE, dS2, dz2, P, TURNED, K, P, V, BK, BV)
    if CONSTANT:
        tl.store(d_constant_q + row, d_c)
        if HAS_D_STATE:
            d_row += load_vector(d_state + row * SIZE + F * V, V, BV)
            d_count += tl.load(d_state + row * SIZE + K * V + F)
        if HAS_INITIAL:
            store_vector(d_initial + row * SIZE + F * V, d_row, V, BV)
            tl.store(d_initial + row * SIZE + K * V + F, d_count)

    high, low = as_operand(dS, BF16, IEEE), remainder(dS, BF16, IEEE)
    high2, low2 = as_operand(dS2, BF16, IEEE), remainder(dS2, BF16, IEEE)
    dk += head_start(place, f * B + b, H_kv, Tk, D, BY_TOKEN_K)
    dv += head_start(b * H_kv + h, b, H_kv, Tk, FLOWS * V, BY_TOKEN_V) + f * V
    dk_t = H_kv * D if BY_TOKEN_K else D
    dv_t = H_kv * FLOWS * V if BY_TOKEN_V else FLOWS * V
    d_token_k += place * Tk
    d_table_k += row * 2 * F
    d_c = walk_keys(
        k, v, mask, dk, dv, table_k, token_k, d_table_k, d_token_k, (high, low, high2, low2, dz, dz2),
        (c_k, d_row, d_count), k_t, k_d, v_t, v_d, dk_t, dv_t, mask_t, token_k_t, 0, Tk,
        HAS_MASK, MAP_K, TOKEN_K, LEARN_K, CONSTANT, PARTS, TURNED, SPLIT, D, V, BT, BK, BV,
    )  # fmt: skip
    if CONSTANT:
        tl.store(d_constant_k + row, d_c)
