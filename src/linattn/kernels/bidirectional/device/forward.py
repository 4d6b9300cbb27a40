# mypy: ignore-errors
"""Bidirectional attention of one key head and its query heads in one program: for short sequences.

    S = initial + sum_s psi_s v_s^T,  z = initial + sum_s psi_s
    o_t = phi_t S / n_t,  n_t = phi_t . z + eps  or  max(abs(phi_t . z), 1)  or  1

q (B, H, Tq, D), k (B, H_kv, Tk, D), v (B, H_kv, Tk, FLOWS V) strided; o (B, H, Tq, FLOWS V), see memory; mask (B, Tk)
uint8; initial, state (B, H_kv FLOWS, K V + K) contiguous fp32: S row by row, then z; none if flows are JOINED.
Grid: B H_kv FLOWS.
NORM 0 none, 1 sum, 2 abs_max_one. G = H / H_kv. Features: see features.
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
from linattn.kernels.bidirectional.device.features import FOLD, exchanged, folded, head_of, load_mapped, turns
from linattn.kernels.bidirectional.device.memory import (
    head_start,
    load_rows,
    load_state,
    load_vector,
    store_state,
    store_vector,
    visible,
)
from linattn.kernels.bidirectional.device.read_walk import answer_queries
from linattn.kernels.maps.device.functions import load_table


@triton.jit(do_not_specialize=["Tq", "Tk", "eps", "H_kv", "G"])
def bidirectional_forward(
    q, k, v, o, mask, initial, state, table_q, token_q, constant_q, table_k, token_k, constant_k,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, mask_b, mask_t,
    table_q_b, table_q_h, table_q_g, table_q_f, token_q_b, token_q_h, token_q_g, token_q_t,
    table_k_b, table_k_h, table_k_f, token_k_b, token_k_h, token_k_t,
    H_kv, G, Tq, Tk, eps,
    NORM: tl.constexpr, HAS_MASK: tl.constexpr, HAS_INITIAL: tl.constexpr, STORE_STATE: tl.constexpr,
    GROUPED: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, TOKEN_Q: tl.constexpr, TOKEN_K: tl.constexpr,
    CONSTANT: tl.constexpr,
    FLOWS: tl.constexpr, JOINED: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, BY_TOKEN: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    F: tl.constexpr = K - CONSTANT
    SIZE: tl.constexpr = K * V + K
    P: tl.constexpr = F // PARTS
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
    S, lost = tl.zeros((BK, BV), tl.float32), tl.zeros((BK, BV), tl.float32)
    S2, lost2 = S, lost
    Z, z_rows = tl.zeros((BK, NARROW), tl.float32), tl.zeros((FOLD, BK), tl.float32)
    z2_rows = z_rows
    values_sum, counts = tl.zeros((BV, NARROW), tl.float32), tl.zeros((BT,), tl.float32)
    params = load_table(table_k, MAP_K, D, BK)
    for t in range(0, Tk, BT):
        keep = visible(mask, t, Tk, mask_t, HAS_MASK, BT)
        keys, keys2, _ = load_mapped(k, t, keep, k_t, k_d, params, token_k, token_k_t, MAP_K, TOKEN_K, False, D, BT, BK)
        values = load_rows(v, t, keep, v_t, v_d, V, BT, BV)
        S, lost = times_exactly(tl.trans(keys), values, S, lost, IEEE)
        if PARTS == 2:
            S2, lost2 = times_exactly(tl.trans(keys2), values, S2, lost2, IEEE)
        if NORM != 0 or STORE_STATE:
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
        S += load_state(initial + row * SIZE, P, V, BK, BV)
        z += load_vector(initial + row * SIZE + K * V, P, BK)
        if PARTS == 2:
            S2 += load_state(initial + row * SIZE + P * V, P, V, BK, BV)
            z2 += load_vector(initial + row * SIZE + K * V + P, P, BK)
    if STORE_STATE:
        store_state(state + row * SIZE, S, z, 0, False, K, P, V, BK, BV)
        if PARTS == 2:
            store_state(state + row * SIZE, S2, z2, P, False, K, P, V, BK, BV)
    last, z_last = tl.zeros((BV,), tl.float32), 0.0
    if CONSTANT:
        c_q, c_k = tl.load(constant_q), tl.load(constant_k)
        last, z_last = c_k * tl.sum(values_sum, 1), c_k * tl.sum(counts, 0)
        if HAS_INITIAL:
            last += load_vector(initial + row * SIZE + F * V, V, BV)
            z_last += tl.load(initial + row * SIZE + K * V + F)
        if STORE_STATE:
            store_vector(state + row * SIZE + F * V, last, V, BV)
            tl.store(state + row * SIZE + K * V + F, z_last)
        last, z_last = c_q * last, c_q * z_last

    table_q += b * table_q_b + h * table_q_h + f * table_q_f
    in_second, y, y2 = (tl.arange(0, BV) >= V // 2)[None, :], z, z2
    if JOINED:
        turned = turns(table_q, table_q_f, F, BK) != turns(table_k, table_k_f, F, BK)
        S, S2 = exchanged(S, S2, turned[:, None] & in_second)
        y, y2 = exchanged(z, z2, turned)
    high, low, zs = as_operand(S, BF16, IEEE), remainder(S, BF16, IEEE), pair(z, BF16, IEEE)
    high2, low2 = as_operand(S2, BF16, IEEE), remainder(S2, BF16, IEEE)
    q += b * q_b + h * G * q_h
    o += head_start((b * H_kv + h) * G, b, H_kv * G, Tq, FLOWS * V, BY_TOKEN) + f * V
    o_h, o_t = (FLOWS * V, H_kv * G * FLOWS * V) if BY_TOKEN else (tl.cast(Tq, tl.int64) * FLOWS * V, FLOWS * V)
    token_q += b * token_q_b + h * token_q_h
    answer_queries(
        q, o, table_q, token_q, (high, low, high2, low2, z, z2, zs), (last, z_last), (in_second, y, y2),
        q_h, q_t, q_d, o_h, o_t, table_q_g, token_q_g, token_q_t, G, 0, Tq, V, eps,
        NORM, GROUPED, MAP_Q, TOKEN_Q, CONSTANT, JOINED, PARTS, SPLIT, D, V, BT, BK, BV,
    )  # fmt: skip
