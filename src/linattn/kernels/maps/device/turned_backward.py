# mypy: ignore-errors
"""Gradients of a feature map with turned features, which are computed again from the inputs."""

import triton
import triton.language as tl

from linattn.kernels.maps.device.codes import is_short, one_sided, parts_of
from linattn.kernels.maps.device.function_grads import store_table_grad, table_terms, tile_grad
from linattn.kernels.maps.device.functions import load_table, map_tile, parts_from
from linattn.kernels.maps.device.turning import dot_rows, load_inputs, load_sums, load_turns, store_sums, turn_pairs


@triton.jit(do_not_specialize=["T"])
def turned_backward(
    x, z, key_mask, cos, sin, table, token, d_out, d_total, dx, d_z, d_table, d_token, eps,
    x_b, x_h, x_t, x_d,  # strides
    mask_b, mask_t, table_b, table_h, token_b, token_h, token_t, out_b, out_h, out_t, dx_b, dx_h, dx_t,
    T, H, TABLE_GROUP: tl.constexpr, TOKEN_GROUP: tl.constexpr, FLOWS: tl.constexpr, GROUP: tl.constexpr,
    MAP: tl.constexpr, HAS_TOKEN: tl.constexpr, HAS_MASK: tl.constexpr, IS_QUERY: tl.constexpr,
    LEARNS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """As ``turned_forward``; a program does BT tokens of a head, all its flows.

    d_out (B, H FLOWS, T, F), its channels adjacent, and of keys d_total (B, H FLOWS, F), the gradient of z -> dx
    (B, H, T, D), its channels adjacent, d_token (B, H, T), and what these tokens add to the table's gradient, d_table
    (B, H, FLOWS, tiles, 2, F), if it LEARNS, and of queries to that of z, d_z (B, H FLOWS, tiles, F).
    """
    PARTS: tl.constexpr = parts_of(MAP)
    BD: tl.constexpr = BF // PARTS
    F: tl.constexpr = PARTS * D
    FAST: tl.constexpr = is_short(x.dtype.element_ty)
    tiles = tl.cdiv(T, BT)
    program = tl.program_id(0)
    tile, head = program % tiles, (program // tiles).to(tl.int64)
    b, h = head // H, head % H
    row, keep, kept, raw, factor = load_inputs(
        x, key_mask, token, b, h, tile, T, x_b, x_h, x_t, x_d, mask_b, mask_t, token_b, token_h, token_t,
        TOKEN_GROUP, HAS_TOKEN, HAS_MASK, D, BT, BD,
    )  # fmt: skip
    channel = tl.arange(0, BD)
    inside = channel < D
    c, s = load_turns(cos, sin, row, keep, 0, D, W, BD)
    c_second, s_second = c, s
    if PARTS == 2 and D % W != 0:
        c_second, s_second = load_turns(cos, sin, row, keep, 1, D, W, BD)
    sum_x, sum_token = tl.zeros((BT, BD), tl.float32), tl.zeros((BT,), tl.float32)
    for flow in tl.static_range(FLOWS):
        key_head = h // GROUP * FLOWS + flow
        virtual = key_head * GROUP + h % GROUP
        params = load_table(table + b * table_b + (h // TABLE_GROUP * FLOWS + flow) * table_h, MAP, D, BD)
        core, second, side = map_tile(raw, kept, params, factor, MAP, FAST, D, BT, BD)
        base = d_out + b * out_b + virtual * out_h + row.to(tl.int64)[:, None] * out_t
        # Back by the same angles: the gradients of features that are not turned.
        g = tl.load(base + channel[None, :], mask=kept, other=0.0).to(tl.float32)
        g = turn_pairs(g, c, -s, BT, BD)
        g_second = g
        if PARTS == 2:
            g_second = tl.load(base + D + channel[None, :], mask=kept, other=0.0).to(tl.float32)
            g_second = turn_pairs(g_second, c_second, -s_second, BT, BD)
        if IS_QUERY:
            z_first, z_second = load_sums(z + (b * (H // GROUP * FLOWS) + key_head) * F, MAP, D, BD)
            phi, phi_second, _ = parts_from(core, second, side, factor, MAP, HAS_TOKEN, tl.float32)
            inverse = 1.0 / (dot_rows(phi, phi_second, z_first, z_second, MAP) + eps)
            dn = -dot_rows(phi, phi_second, g, g_second, MAP) * inverse * inverse
            store_sums(d_z + ((b * (H * FLOWS) + virtual) * tiles + tile) * F, dn * phi, dn * phi_second, MAP, D, BD)
            g = g * inverse + dn * z_first
            g_second = g_second * inverse + dn * z_second
        else:
            to_first, to_second = load_sums(d_total + (b * (H * FLOWS) + virtual) * F, MAP, D, BD)
            g += to_first
            g_second += to_second
        g, g_second = tl.where(kept, g, 0.0), tl.where(kept, g_second, 0.0)
        if one_sided(MAP):
            g = tl.where(side < 0, g_second, g)
        to_x, to_token, g, g_second = tile_grad(
            raw, core, second, side, g, g_second, params, factor, kept, MAP, FAST, HAS_TOKEN, BT, BD
        )
        sum_x += to_x
        sum_token += to_token
        if LEARNS:
            to_a, to_b = table_terms(raw, core, side, g, g_second, params, MAP, FAST, BT, BD)
            part = d_table + ((head * FLOWS + flow) * tiles + tile) * (2 * F)
            store_table_grad(part, tl.sum(to_a, 0), tl.sum(to_b, 0), params, MAP, D, BD)
    at = dx + b * dx_b + h * dx_h + row.to(tl.int64)[:, None] * dx_t + channel[None, :]
    tl.store(at, sum_x.to(dx.dtype.element_ty), mask=keep[:, None] & inside[None, :])
    if HAS_TOKEN:
        tl.store(d_token + head * T + row, sum_token, mask=keep)
