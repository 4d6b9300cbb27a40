# mypy: ignore-errors
"""A walk over queries, backward, for both flows of split_power at once; see joined_tiles. With u_f = S_f do_f:

n_0 = phi . z + eps, n_1 = phi . y + eps,   r_f = (phi . u_f) / n_f,   delta_f = - r_f / n_f
dphi = u_0 / n_0 + u_1 / n_1 + delta_0 z + delta_1 y,   dS_f = sum_t phi (do_f / n_f)^T
dz = sum_t delta_0 phi + delta_1 (phi, its parts exchanged)
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import as_operand, norm_slope, times_wide
from linattn.kernels.bidirectional.device.features import exchanged
from linattn.kernels.bidirectional.device.joined_tiles import (
    by_side,
    from_both,
    in_products_layout,
    inverse_of,
    kept_sums,
    load_columns,
    operands,
    power_of,
    store_columns,
    sums_of_both,
    with_sign,
)
from linattn.kernels.bidirectional.device.memory import load_rows
from linattn.kernels.maps.device.codes import SPLIT_POWER
from linattn.kernels.maps.device.function_grads import store_table_grad
from linattn.kernels.maps.device.functions import load_table
from linattn.kernels.maps.device.numbers import over


@triton.jit
def walk_joined_queries(
    q, do, dq, table_q, d_table_q, state, q_h, q_t, q_d, do_h, do_t, do_d, dq_h, dq_t, table_q_g, G, first, end, eps,
    NORM: tl.constexpr, GROUPED: tl.constexpr, LEARN_Q: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Tokens first ... end - 1 of all heads of the group; pointers are those of the group's first head.

    state: S_00, S_01, S_10, S_11 (D, BV) in fp32; z, z2 (D, 1); turned (D, 1). Returns dS of the four, and dz, dz2
    (D,). V counts a flow's values.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    BF16: tl.constexpr = dtype == tl.bfloat16
    S00, S01, S10, S11, z, z2, turned = state
    high00, low00 = operands(S00, BF16)
    high01, low01 = operands(S01, BF16)
    high10, low10 = operands(S10, BF16)
    high11, low11 = operands(S11, BF16)
    y, y2 = exchanged(z, z2, turned)
    turn = tl.where(turned, -1.0, 1.0)
    dS00 = tl.zeros((D, BV), tl.float32)
    dS01, dS10, dS11 = dS00, dS00, dS00
    # Of both parts together, and of the first less the second.
    dz_both, dz_less = tl.zeros((D, 4), tl.float32), tl.zeros((D, 4), tl.float32)
    # Without a group no loop: it would keep registers from the one inside it.
    for head in range(0, G if GROUPED else 1):
        g = tl.cast(head, tl.int64)
        params = load_table(table_q + g * table_q_g, SPLIT_POWER, D, D)
        a, b = tl.trans(params[0]), tl.trans(params[1])
        to_a, to_b = tl.zeros((D, 4), tl.float32), tl.zeros((D, 4), tl.float32)
        for t in range(first, end, BT):
            valid = t + tl.arange(0, BT) < end
            raw = in_products_layout(load_columns(q + g * q_h, t, valid, q_t, q_d, BT, D), BT, D)
            phi, phi2, side, log, c = power_of(raw, a, b, dtype)
            grads0 = load_rows(do + g * do_h, t, valid, do_t, do_d, V, BT, BV)
            grads1 = load_rows(do + g * do_h + V * do_d, t, valid, do_t, do_d, V, BT, BV)
            if BF16:
                grads0, grads1 = grads0.to(tl.bfloat16), grads1.to(tl.bfloat16)
            else:
                grads0, grads1 = grads0.to(tl.float32), grads1.to(tl.float32)
            weighted0, weighted1 = grads0, grads1
            if NORM != 0:
                den0, den1 = sums_of_both(c * by_side(side, z, z2), c * by_side(side, y, y2))
                scale0, scale1 = inverse_of(den0, valid, eps, NORM), inverse_of(den1, valid, eps, NORM)
                weighted0 = as_operand(grads0.to(tl.float32) * scale0[:, None], BF16, False)
                weighted1 = as_operand(grads1.to(tl.float32) * scale1[:, None], BF16, False)
            dS00 = times_wide(phi, weighted0, dS00, False)
            dS01 = times_wide(phi2, weighted0, dS01, False)
            dS10 = times_wide(phi, weighted1, dS10, False)
            dS11 = times_wide(phi2, weighted1, dS11, False)
            nothing = tl.zeros((D, BT), tl.float32)
            grads0_t, grads1_t = tl.trans(grads0), tl.trans(grads1)
            u0 = by_side(
                side,
                from_both(nothing, grads0_t, high00, low00, SPLIT),
                from_both(nothing, grads0_t, high01, low01, SPLIT),
            )
            u1 = by_side(
                side,
                from_both(nothing, grads1_t, high10, low10, SPLIT),
                from_both(nothing, grads1_t, high11, low11, SPLIT),
            )
            if NORM != 0:
                u0, u1 = u0 * scale0[None, :], u1 * scale1[None, :]
                through0, through1 = sums_of_both(c * u0, c * u1)
                delta0 = (-scale0 * norm_slope(den0, NORM) * through0)[None, :]
                delta1 = (-scale1 * norm_slope(den1, NORM) * through1)[None, :]
                d_phi = u0 + u1
                d_phi += by_side(side, delta0 * z + delta1 * y, delta0 * z2 + delta1 * y2)
                dz_both += kept_sums(c * (delta0 + delta1), BT, D)
                dz_less += kept_sums(with_sign(c, side) * (delta0 + turn * delta1), BT, D)
            else:
                d_phi = u0 + u1
            d_phi *= c
            store_columns(dq + g * dq_h, t, valid, dq_t, over(d_phi * (a * b), side, True), BT, D)
            if LEARN_Q:
                to_a += kept_sums(d_phi * log, BT, D)
                to_b += kept_sums(d_phi, BT, D)
        if LEARN_Q:
            store_table_grad(d_table_q + g * 4 * D, tl.sum(to_a, 1), tl.sum(to_b, 1), params, SPLIT_POWER, D, D)
    dz_both, dz_less = 0.5 * tl.sum(dz_both, 1), 0.5 * tl.sum(dz_less, 1)
    return dS00, dS01, dS10, dS11, dz_both + dz_less, dz_both - dz_less
