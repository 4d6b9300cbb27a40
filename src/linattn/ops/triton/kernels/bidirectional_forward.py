# mypy: ignore-errors
"""Bidirectional attention of one key head and its query heads in one program: for short sequences.

    S = initial + sum_s psi_s v_s^T,  z = initial + sum_s psi_s
    o_t = phi_t S / n_t,  n_t = phi_t . z + eps  or  max(abs(phi_t . z), 1)  or  1

q (B, H, Tq, K), k (B, H_kv, Tk, K), v (B, H_kv, Tk, V) strided; o (B, H, Tq, V) contiguous; mask (B, Tk) uint8;
initial, state (B, H_kv, K V + K) contiguous fp32: S row by row, then z. Grid: B H_kv.
NORM 0 none, 1 sum, 2 abs_max_one. G = H / H_kv.
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
    pair,
    remainder,
    store_rows,
    store_state,
    times,
    times_wide,
    visible,
)


@triton.jit(do_not_specialize=["Tq", "Tk", "eps", "H_kv", "G"])
def bidirectional_forward(
    q, k, v, o, mask, initial, state,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, mask_b, mask_t,
    H_kv, G, Tq, Tk, eps,
    NORM: tl.constexpr, HAS_MASK: tl.constexpr, HAS_INITIAL: tl.constexpr, STORE_STATE: tl.constexpr,
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
    S = tl.zeros((BK, BV), tl.float32)
    Z = tl.zeros((BK, NARROW), tl.float32)
    for t in range(0, Tk, BT):
        keep = visible(mask, t, Tk, mask_t, HAS_MASK, BT)
        keys = tl.trans(load_rows(k, t, keep, k_t, k_d, K, BT, BK))
        S = times(keys, load_rows(v, t, keep, v_t, v_d, V, BT, BV), S)
        if NORM != 0 or STORE_STATE:
            Z = times(keys, ones, Z)
    z = tl.sum(Z, 1)
    if HAS_INITIAL:
        S += load_state(initial + row * (K * V + K), K, V, BK, BV)
        z += load_state_keys(initial + row * (K * V + K), K, V, BK)
    if STORE_STATE:
        store_state(state + row * (K * V + K), S, z, K, V, BK, BV)

    high, low, zs = as_operand(S, BF16), remainder(S, BF16), pair(z, BF16)
    q += b * q_b + h * G * q_h
    o += row * G * Tq * V
    tiles = tl.cdiv(Tq, BT)
    for i in range(0, G * tiles):
        g, t = i // tiles, (i % tiles) * BT
        valid = t + tl.arange(0, BT) < Tq
        queries = load_rows(q + tl.cast(g, tl.int64) * q_h, t, valid, q_t, q_d, K, BT, BK)
        out = times_wide(queries, high, tl.zeros((BT, BV), tl.float32), IEEE)
        if SPLIT and BF16:
            out = times_wide(queries, low, out, IEEE)
        if NORM != 0:
            den = tl.sum(times_wide(queries, zs, tl.zeros((BT, NARROW), tl.float32), IEEE), 1)
            out *= inverse_norm(den, valid, eps, NORM)[:, None]
        store_rows(o + tl.cast(g, tl.int64) * Tq * V, t, valid, V, out, V, BT, BV)
