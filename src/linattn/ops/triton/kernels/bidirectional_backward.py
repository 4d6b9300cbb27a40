# mypy: ignore-errors
# ruff: noqa: SIM108 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""Gradients of bidirectional attention, one key head and its query heads in one program: for short sequences.

S and z are made again from k and v, which are then read a second time from the cache: cheaper than to have stored
them. With u_t = S do_t and numerators that are never needed, since do_t . num_t = phi_t . u_t:

    r_t = (phi_t . u_t) / n_t * dn/dden,   dphi_t = (u_t - r_t z) / n_t,     delta_t = - r_t / n_t
    dS = d_state + sum_t phi_t (do_t / n_t)^T,   dz = d_state + sum_t delta_t phi_t
    dpsi_s = dS v_s + dz,                  dv_s = dS^T psi_s

Shapes as in bidirectional_forward; do (B, H, Tq, FLOWS V) strided; dq (FLOWS, B, H, Tq, D), dk (FLOWS, B, H_kv, Tk, D),
dv contiguous; initial, d_state, d_initial (B, H_kv FLOWS, K V + K) contiguous fp32. Grid: B H_kv FLOWS.
With maps, parts to be summed: d_table_q (B, H_kv FLOWS, G, 2, F), d_table_k (B, H_kv FLOWS, 2, F), d_token_q (FLOWS, B,
H, Tq), d_token_k (FLOWS, B, H_kv, Tk), d_constant_q and _k (B, H_kv FLOWS), contiguous fp32; d_table_q is not written
where there is no query.
A transposed result of a dot must not be an operand of a dot: of features as they are, dS is made, and dpsi as a tile
(BK, BT); of mapped ones, which are made of the result of a dot (see ``as_product``), dS^T, and dv as a tile (BV, BT).
"""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.bidirectional_common import (
    NARROW,
    add_weighted,
    as_operand,
    denominator,
    first_column,
    from_state,
    inverse_norm,
    key_grads,
    load_rows,
    load_state_as,
    load_state_transposed,
    load_vector,
    norm_slope,
    pair,
    remainder,
    store_rows,
    store_state,
    store_vector,
    times,
    times_exactly,
    visible,
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
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, TOKEN_Q: tl.constexpr, TOKEN_K: tl.constexpr,
    LEARN_Q: tl.constexpr, LEARN_K: tl.constexpr, CONSTANT: tl.constexpr, FLOWS: tl.constexpr, PARTS: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    SHORT: tl.constexpr = is_short(q.dtype.element_ty)
    F: tl.constexpr = K - CONSTANT
    P: tl.constexpr = F // PARTS
    TURNED: tl.constexpr = MAP_Q >= 0 or MAP_K >= 0
    SIZE: tl.constexpr = K * V + K
    # Made in the loop, features are summed in registers: see denominator.
    SUM_KEYS: tl.constexpr = IEEE or MAP_K >= 0
    SUM_QUERIES: tl.constexpr = IEEE or MAP_Q >= 0
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
    if CONSTANT:
        c_q, c_k = tl.load(constant_q), tl.load(constant_k)
        last, z_last = c_k * tl.sum(values_sum, 1), c_k * tl.sum(counts, 0)
        if HAS_INITIAL:
            last += load_vector(initial + row * SIZE + F * V, V, BV)
            z_last += tl.load(initial + row * SIZE + K * V + F)
        d_last, dz_last = tl.zeros((FOLD, BV), tl.float32), tl.zeros((BT,), tl.float32)
        d_c = tl.zeros((BT,), tl.float32)
    high, low, zs = as_operand(S, BF16, IEEE), remainder(S, BF16, IEEE), pair(z, BF16, IEEE)
    if PARTS == 2:
        high2, low2 = as_operand(S2, BF16, IEEE), remainder(S2, BF16, IEEE)

    head = (f * B + b) * H_kv + h
    q += b * q_b + h * G * q_h
    do += b * do_b + h * G * do_h + f * V * do_d
    dq += head * G * Tq * D
    d_token_q += head * G * Tq
    d_table_q += row * G * 2 * F
    table_q += b * table_q_b + h * table_q_h + f * table_q_f
    token_q += b * token_q_b + h * token_q_h
    dS = tl.zeros((BV, BK) if TURNED else (BK, BV), tl.float32)
    dS2 = dS
    # Not a dot: narrow products with operands made in the loop came out wrong on Hopper (Triton 3.6).
    dZ, dz_rows = tl.zeros((BT, BK), tl.float32), tl.zeros((BT // 16, 8, BK), tl.float32)
    dz2_rows = dz_rows
    tiles = tl.cdiv(Tq, BT)
    # Heads of the group in a loop of their own where each has a table, which is then read once.
    NESTED: tl.constexpr = has_table(MAP_Q)
    for outer in range(0, G if NESTED else 1):
        params = load_table(table_q + tl.cast(outer, tl.int64) * table_q_g, MAP_Q, D, BK)
        a_rows = tl.zeros((BT // 16, 8, BK), tl.float32)
        b_rows = a_rows
        for i in range(0, tiles if NESTED else G * tiles):
            g, t = tl.cast(outer + i // tiles, tl.int64), (i % tiles) * BT
            valid = t + tl.arange(0, BT) < Tq
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
                store_rows(dq + g * Tq * D, t, valid, D, u, D, BT, BK)
            else:
                u, u2 = store_mapped_grad(
                    tile, t, valid, valid, params, token_q + g * token_q_g, token_q_t, u, u2,
                    dq + g * Tq * D, d_token_q + g * Tq, MAP_Q, TOKEN_Q, D, BT, BK,
                )  # fmt: skip
                if LEARN_Q:
                    to_a, to_b = table_terms(tile[0], tile[1], tile[3], u, u2, params, MAP_Q, SHORT, BT, BK)
                    a_rows, b_rows = a_rows + paired(to_a, BT, BK), b_rows + paired(to_b, BT, BK)
        if LEARN_Q:
            into = d_table_q + tl.cast(outer, tl.int64) * 2 * F
            store_table_grad(into, over_tokens(a_rows, BT, BK), over_tokens(b_rows, BT, BK), params, MAP_Q, D, BK)
    dz = tl.sum(dZ, 0) if MAP_Q < 0 else over_tokens(dz_rows, BT, BK)
    dz2 = over_tokens(dz2_rows, BT, BK)
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
        tl.store(d_constant_q + row, tl.sum(d_c, 0))
        d_c = tl.zeros((BT,), tl.float32)
        d_row, d_count = c_q * tl.sum(d_last, 0), c_q * tl.sum(dz_last, 0)
        if HAS_D_STATE:
            d_row += load_vector(d_state + row * SIZE + F * V, V, BV)
            d_count += tl.load(d_state + row * SIZE + K * V + F)
        if HAS_INITIAL:
            store_vector(d_initial + row * SIZE + F * V, d_row, V, BV)
            tl.store(d_initial + row * SIZE + K * V + F, d_count)

    high, low = as_operand(dS, BF16, IEEE), remainder(dS, BF16, IEEE)
    if PARTS == 2:
        high2, low2 = as_operand(dS2, BF16, IEEE), remainder(dS2, BF16, IEEE)
    dk += head * Tk * D
    dv += (b * H_kv + h) * Tk * FLOWS * V + f * V
    d_token_k += head * Tk
    params = load_table(table_k, MAP_K, D, BK)
    a_rows = tl.zeros((BT // 16, 8, BK), tl.float32)
    b_rows = a_rows
    for t in range(0, Tk, BT):
        keep = visible(mask, t, Tk, mask_t, HAS_MASK, BT)
        exists = t + tl.arange(0, BT) < Tk
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
            d_c += tl.where(keep, tl.sum(values.to(tl.float32) * d_row[None, :], 1) + d_count, 0.0)
            d_values += tl.where(keep[:, None], c_k * d_row[None, :], 0.0)
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
        into = d_table_k + row * 2 * F
        store_table_grad(into, over_tokens(a_rows, BT, BK), over_tokens(b_rows, BT, BK), params, MAP_K, D, BK)
    if CONSTANT:
        tl.store(d_constant_k + row, tl.sum(d_c, 0))
