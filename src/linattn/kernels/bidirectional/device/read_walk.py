# mypy: ignore-errors
"""A walk over the queries of a group, forward: o_t = phi_t S / n_t."""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import denominator, inverse_norm, times_wide
from linattn.kernels.bidirectional.device.features import contracted, counting, load_mapped
from linattn.kernels.maps.device.functions import load_table


@triton.jit
def answer_queries(
    q, o, table_q, token_q, state, constants, second, q_h, q_t, q_d, o_h, o_t, table_q_g, token_q_g, token_q_t,
    G, first, end, columns, eps,
    NORM: tl.constexpr, GROUPED: tl.constexpr, MAP_Q: tl.constexpr, TOKEN_Q: tl.constexpr, CONSTANT: tl.constexpr,
    JOINED: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Tokens first ... end - 1 of all heads of the group, the first ``columns`` of BV columns of o.

    Pointers are those of the group's first head, o that of its first column. state: S as operands (high, low, and those
    of part 1), z, that of part 1, z as an operand. constants: what a constant feature adds to every output and
    denominator. second: where flows are JOINED, which columns are those of flow 1, its z, that of part 1.
    """
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    # Made in the loop, features are summed in registers: see denominator.
    SUM_QUERIES: tl.constexpr = IEEE or MAP_Q >= 0
    high, low, high2, low2, z, z2, zs = state
    last, z_last = constants
    in_second, y, y2 = second
    steps, column = tl.arange(0, BT), tl.arange(0, BV)
    # Without a group no loop: it would keep registers from the one inside it.
    for head in range(0, G if GROUPED else 1):
        g = tl.cast(head, tl.int64)
        params = load_table(table_q + g * table_q_g, MAP_Q, D, BK)
        for t in range(first, end, BT):
            valid = t + steps < end
            queries, queries2, tile = load_mapped(
                q + g * q_h, t, valid, q_t, q_d, params, token_q + g * token_q_g, token_q_t,
                MAP_Q, TOKEN_Q, False, D, BT, BK,
            )  # fmt: skip
            out = times_wide(queries, high, tl.zeros((BT, BV), tl.float32), IEEE)
            if PARTS == 2:
                out = times_wide(queries2, high2, out, IEEE)
            if SPLIT and not IEEE:
                out = times_wide(queries, low, out, IEEE)
                if PARTS == 2:
                    out = times_wide(queries2, low2, out, IEEE)
            if CONSTANT:
                out += last[None, :]
            if NORM != 0:
                if SUM_QUERIES:
                    at = counting(tile, z[None, :], z2[None, :], MAP_Q)
                    den = contracted(queries, queries2, tile, at, z2[None, :], MAP_Q, PARTS)
                else:
                    den = denominator(queries, zs, BT)
                if CONSTANT:
                    den += z_last
                scale = inverse_norm(den, valid, eps, NORM)[:, None]
                if JOINED:
                    at = counting(tile, y[None, :], y2[None, :], MAP_Q)
                    den = contracted(queries, queries2, tile, at, y2[None, :], MAP_Q, PARTS)
                    out = tl.where(in_second, out * inverse_norm(den, valid, eps, NORM)[:, None], out * scale)
                else:
                    out *= scale
            rows = o + g * o_h + (tl.cast(t, tl.int64) + steps)[:, None] * o_t + column[None, :]
            exists = valid[:, None] if V % BV == 0 else valid[:, None] & (column < columns)[None, :]
            tl.store(rows, out.to(o.dtype.element_ty), mask=exists)
