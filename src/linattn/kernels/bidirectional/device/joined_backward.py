# mypy: ignore-errors
"""Gradients for both flows of split_power, one key head and its query heads in one program: for short sequences.

Shapes as in backward, but dq (B, H, Tq, D) and dk (B, H_kv, Tk, D); no states, factors per token or constants. Of the
tables flow 0 gets the gradients: d_table_q (B, H_kv, 2, G, 2, 2 D), d_table_k (B, H_kv, 2, 1, 2, 2 D). Grid: B H_kv.
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import times
from linattn.kernels.bidirectional.device.features import exchanged, turns
from linattn.kernels.bidirectional.device.joined_keys import walk_joined_keys
from linattn.kernels.bidirectional.device.joined_queries import walk_joined_queries
from linattn.kernels.bidirectional.device.joined_tiles import load_columns, power_of
from linattn.kernels.bidirectional.device.memory import head_start, load_rows, visible
from linattn.kernels.maps.device.codes import SPLIT_POWER
from linattn.kernels.maps.device.functions import load_table


@triton.jit(do_not_specialize=["Tq", "Tk", "eps", "H_kv", "G"])
def bidirectional_joined_backward(
    q, k, v, do, mask, dq, dk, dv, table_q, table_k, d_table_q, d_table_k,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, do_b, do_h, do_t, do_d, mask_b, mask_t,
    table_q_b, table_q_h, table_q_g, table_q_f, table_k_b, table_k_h, table_k_f,
    H_kv, G, Tq, Tk, eps,
    NORM: tl.constexpr, HAS_MASK: tl.constexpr, GROUPED: tl.constexpr, LEARN_Q: tl.constexpr, LEARN_K: tl.constexpr,
    SPLIT: tl.constexpr, BY_TOKEN_Q: tl.constexpr, BY_TOKEN_K: tl.constexpr, BY_TOKEN_V: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BT_K: tl.constexpr,
    STAGES_K: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = k.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    b, h = row // H_kv, row % H_kv
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    mask += b * mask_b
    table_q += b * table_q_b + h * table_q_h
    table_k += b * table_k_b + h * table_k_h
    S00 = tl.zeros((D, BV), tl.float32)
    S01, S10, S11 = S00, S00, S00
    z_rows, z2_rows = tl.zeros((D, 16), tl.float32), tl.zeros((D, 16), tl.float32)
    params = load_table(table_k, SPLIT_POWER, D, D)
    a, b_k = tl.trans(params[0]), tl.trans(params[1])
    for t in range(0, Tk, BT):
        keep = visible(mask, t, Tk, mask_t, HAS_MASK, BT)
        psi, psi2, _, _, _ = power_of(load_columns(k, t, keep, k_t, k_d, BT, D), a, b_k, dtype)
        values0 = load_rows(v, t, keep, v_t, v_d, V, BT, BV)
        values1 = load_rows(v + V * v_d, t, keep, v_t, v_d, V, BT, BV)
        S00 = times(psi, values0, S00)
        S01 = times(psi2, values0, S01)
        S10 = times(psi, values1, S10)
        S11 = times(psi2, values1, S11)
        if NORM != 0:
            z_rows += tl.sum(tl.reshape(psi.to(tl.float32), (D, BT // 16, 16)), 1)
            z2_rows += tl.sum(tl.reshape(psi2.to(tl.float32), (D, BT // 16, 16)), 1)
    turned = (turns(table_q, table_q_f, 2 * D, D) != turns(table_k, table_k_f, 2 * D, D))[:, None]
    S10, S11 = exchanged(S10, S11, turned)
    q += b * q_b + h * G * q_h
    do += b * do_b + h * G * do_h
    state = (S00, S01, S10, S11, tl.sum(z_rows, 1)[:, None], tl.sum(z2_rows, 1)[:, None], turned)
    dq += head_start(row * G, b, H_kv * G, Tq, D, BY_TOKEN_Q)
    dq_h, dq_t = (D, H_kv * G * D) if BY_TOKEN_Q else (tl.cast(Tq, tl.int64) * D, D)
    dS00, dS01, dS10, dS11, dz, dz2 = walk_joined_queries(
        q, do, dq, table_q, d_table_q + row * G * 8 * D, state,
        q_h, q_t, q_d, do_h, do_t, do_d, dq_h, dq_t, table_q_g, G, 0, Tq, eps,
        NORM, GROUPED, LEARN_Q, SPLIT, D, V, BT, BV,
    )  # fmt: skip
    dS10, dS11 = exchanged(dS10, dS11, turned)
    dk += head_start(row, b, H_kv, Tk, D, BY_TOKEN_K)
    dv += head_start(row, b, H_kv, Tk, 2 * V, BY_TOKEN_V)
    dk_t = H_kv * D if BY_TOKEN_K else D
    dv_t = H_kv * 2 * V if BY_TOKEN_V else 2 * V
    walk_joined_keys(
        k, v, mask, dk, dv, table_k, d_table_k + row * 8 * D,
        (dS00, dS01, dS10, dS11, dz, dz2), k_t, k_d, v_t, v_d, dk_t, dv_t, mask_t, 0, Tk,
        HAS_MASK, LEARN_K, SPLIT, D, V, BT_K, BV, STAGES_K,
    )  # fmt: skip
