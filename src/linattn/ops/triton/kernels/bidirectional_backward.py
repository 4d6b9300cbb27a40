# mypy: ignore-errors
# ruff: noqa: SIM108 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""Gradients of bidirectional attention, one key head and its query heads in one program: for short sequences.

S and z are made again from k and v, which are then read a second time from the cache: cheaper than to have stored
them. With u_t = S do_t and numerators that are never needed, since do_t . num_t = phi_t . u_t:

    dphi_t = u_t / n_t + delta_t z,        delta_t = - (phi_t . u_t) / n_t^2 * dn/dden
    dS = d_state + sum_t phi_t (do_t / n_t)^T,   dz = d_state + sum_t delta_t phi_t
    dpsi_s = dS v_s + dz,                  dv_s = dS^T psi_s

Shapes as in bidirectional_forward; do (B, H, Tq, V) strided; dq, dk, dv contiguous; initial, d_state, d_initial
(B, H_kv, K V + K) contiguous fp32. Grid: B H_kv.
dpsi is made as a tile (BK, BT): a transposed result of a dot must not be an operand of a dot, and dS^T would take a
quarter of the registers.
"""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.bidirectional_common import (
    NARROW,
    as_operand,
    first_column,
    inverse_norm,
    load_rows,
    load_state,
    load_state_keys,
    load_state_transposed,
    norm_slope,
    pair,
    remainder,
    store_columns,
    store_rows,
    store_state,
    times,
    times_wide,
    visible,
)


@triton.jit(do_not_specialize=["Tq", "Tk", "eps", "H_kv", "G"])
def bidirectional_backward(
    q, k, v, do, mask, initial, d_state, dq, dk, dv, d_initial,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, do_b, do_h, do_t, do_d, mask_b, mask_t,
    H_kv, G, Tq, Tk, eps,
    NORM: tl.constexpr, HAS_MASK: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_D_STATE: tl.constexpr,
    SPLIT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    b, h = row // H_kv, row % H_kv
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    mask += b * mask_b
    ones = first_column(BT, k.dtype.element_ty)
    S_t = tl.zeros((BV, BK), tl.float32)
    Z = tl.zeros((BK, NARROW), tl.float32)
    for t in range(0, Tk, BT):
        keep = visible(mask, t, Tk, mask_t, HAS_MASK, BT)
        keys = load_rows(k, t, keep, k_t, k_d, K, BT, BK)
        S_t = times(tl.trans(load_rows(v, t, keep, v_t, v_d, V, BT, BV)), keys, S_t)
        if NORM != 0:
            Z = times(tl.trans(keys), ones, Z)
    z = tl.sum(Z, 1)
    if HAS_INITIAL:
        S_t += load_state_transposed(initial + row * (K * V + K), K, V, BK, BV)
        z += load_state_keys(initial + row * (K * V + K), K, V, BK)
    high, low, zs = as_operand(S_t, BF16), remainder(S_t, BF16), pair(z, BF16)

    q += b * q_b + h * G * q_h
    do += b * do_b + h * G * do_h
    dq += row * G * Tq * K
    dS = tl.zeros((BK, BV), tl.float32)
    # Not a dot: narrow products with operands made in the loop came out wrong on Hopper (Triton 3.6).
    dZ = tl.zeros((BT, BK), tl.float32)
    tiles = tl.cdiv(Tq, BT)
    for i in range(0, G * tiles):
        g, t = tl.cast(i // tiles, tl.int64), (i % tiles) * BT
        valid = t + tl.arange(0, BT) < Tq
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
        store_rows(dq + g * Tq * K, t, valid, K, u, K, BT, BK)
    dz = tl.sum(dZ, 0)
    if HAS_D_STATE:
        dS += load_state(d_state + row * (K * V + K), K, V, BK, BV)
        dz += load_state_keys(d_state + row * (K * V + K), K, V, BK)
    if HAS_INITIAL:
        store_state(d_initial + row * (K * V + K), dS, dz, K, V, BK, BV)

    high, low = as_operand(dS, BF16), remainder(dS, BF16)
    dk += row * Tk * K
    dv += row * Tk * V
    for t in range(0, Tk, BT):
        keep = visible(mask, t, Tk, mask_t, HAS_MASK, BT)
        exists = t + tl.arange(0, BT) < Tk
        keys = load_rows(k, t, keep, k_t, k_d, K, BT, BK)
        values = load_rows(v, t, keep, v_t, v_d, V, BT, BV)
        values_t = tl.trans(values)
        d_keys = times_wide(high, values_t, tl.zeros((BK, BT), tl.float32), IEEE)
        d_values = times_wide(keys, high, tl.zeros((BT, BV), tl.float32), IEEE)
        if SPLIT and BF16:
            d_keys = times_wide(low, values_t, d_keys, IEEE)
            d_values = times_wide(keys, low, d_values, IEEE)
        d_keys += dz[:, None]
        if HAS_MASK:
            d_keys = tl.where(keep[None, :], d_keys, 0.0)
        store_columns(dk, t, exists, K, d_keys, K, BT, BK)
        store_rows(dv, t, exists, V, d_values, V, BT, BV)
