# mypy: ignore-errors
# ruff: noqa: SIM108 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""A walk over the queries of a group, backward: their gradients, and what they add to the gradient of the state.

With u_t = S do_t:  r_t = (phi_t . u_t) / n_t * dn/dden,  dphi_t = (u_t - r_t z) / n_t,  delta_t = - r_t / n_t,
                    dS = sum_t phi_t (do_t / n_t)^T,  dz = sum_t delta_t phi_t
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import add_weighted, denominator, from_state, inverse_norm, norm_slope
from linattn.kernels.bidirectional.device.features import (
    FOLD,
    contracted,
    counting,
    folded,
    load_mapped,
    over_tokens,
    paired,
    store_mapped_grad,
)
from linattn.kernels.bidirectional.device.memory import load_rows, store_rows
from linattn.kernels.maps.device.codes import is_short, one_sided
from linattn.kernels.maps.device.function_grads import store_table_grad, table_terms
from linattn.kernels.maps.device.functions import load_table


@triton.jit
def walk_queries(
    q, do, dq, table_q, token_q, d_table_q, d_token_q, state, constants,
    q_h, q_t, q_d, do_h, do_t, do_d, dq_h, dq_t, table_q_g, token_q_g, token_q_t, G, T, first, end, eps,
    NORM: tl.constexpr, GROUPED: tl.constexpr, MAP_Q: tl.constexpr, TOKEN_Q: tl.constexpr, LEARN_Q: tl.constexpr,
    CONSTANT: tl.constexpr, PARTS: tl.constexpr, TURNED: tl.constexpr, SPLIT: tl.constexpr,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Tokens first ... end - 1 of all heads of the group; pointers are those of the group's first head.

    state: S^T as operands (high, low, and those of part 1), z, that of part 1, z as an operand. constants: the constant
    feature, the state's row for it (BV,), its part of z. Returns dS, that of part 1 ((BK, BV), or transposed if
    TURNED), dz, that of part 1, and of the constant feature the gradients of its row, of its part of z, of itself.
    """
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    SHORT: tl.constexpr = is_short(q.dtype.element_ty)
    # Made in the loop, features are summed in registers: see denominator.
    SUM_QUERIES: tl.constexpr = IEEE or MAP_Q >= 0
    high, low, high2, low2, z, z2, zs = state
    c_q, last, z_last = constants
    d_last, dz_last = tl.zeros((FOLD, BV), tl.float32), tl.zeros((BT,), tl.float32)
    d_c = tl.zeros((BT,), tl.float32)
    dS = tl.zeros((BV, BK) if TURNED else (BK, BV), tl.float32)
    dS2 = dS
    # Not a dot: narrow products with operands made in the loop came out wrong on Hopper (Triton 3.6).
    dZ, dz_rows = tl.zeros((BT, BK), tl.float32), tl.zeros((BT // 16, 8, BK), tl.float32)
    dz2_rows = dz_rows
    # Without a group no loop: it would keep registers from the one inside it.
    for head in range(0, G if GROUPED else 1):
        g = tl.cast(head, tl.int64)
        params = load_table(table_q + g * table_q_g, MAP_Q, D, BK)
        a_rows = tl.zeros((BT // 16, 8, BK), tl.float32)
        b_rows = a_rows
        for t in range(first, end, BT):
            valid = t + tl.arange(0, BT) < end
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
                store_rows(dq + g * dq_h, t, valid, dq_t, u, D, BT, BK)
            else:
                u, u2 = store_mapped_grad(
                    tile, t, valid, valid, params, token_q + g * token_q_g, token_q_t, u, u2,
                    dq + g * dq_h, dq_t, d_token_q + g * T, MAP_Q, TOKEN_Q, D, BT, BK,
                )  # fmt: skip
                if LEARN_Q:
                    to_a, to_b = table_terms(tile[0], tile[1], tile[3], u, u2, params, MAP_Q, SHORT, BT, BK)
                    a_rows, b_rows = a_rows + paired(to_a, BT, BK), b_rows + paired(to_b, BT, BK)
        if LEARN_Q:
            into = d_table_q + g * 2 * F
            store_table_grad(into, over_tokens(a_rows, BT, BK), over_tokens(b_rows, BT, BK), params, MAP_Q, D, BK)
    dz = tl.sum(dZ, 0) if MAP_Q < 0 else over_tokens(dz_rows, BT, BK)
    dz2 = over_tokens(dz2_rows, BT, BK)
    return dS, dS2, dz, dz2, c_q * tl.sum(d_last, 0), c_q * tl.sum(dz_last, 0), tl.sum(d_c, 0)
