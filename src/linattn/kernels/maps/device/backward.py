# mypy: ignore-errors
"""Gradients of a feature map on its own."""

import triton
import triton.language as tl

from linattn.kernels.maps.device.codes import is_short, learns_table, one_sided, parts_of
from linattn.kernels.maps.device.function_grads import store_table_grad, table_terms, tile_grad
from linattn.kernels.maps.device.functions import load_table, load_token, map_tile


@triton.jit(do_not_specialize=["T"])
def map_backward(
    x, table, token, d_out, dx, d_table, d_token,
    x_b, x_h, x_t, x_d,  # strides
    table_b, table_h, token_b, token_h, token_t, out_b, out_h, out_t,
    T, H, TABLE_GROUP: tl.constexpr, TOKEN_GROUP: tl.constexpr, FLOWS: tl.constexpr,
    MAP: tl.constexpr, HAS_TOKEN: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """A program does BT tokens of a head, all its flows.

    x (B, H, T, D), d_out (B, H FLOWS, T, ..), its channels adjacent -> dx (B, H, T, D), d_token (B, H, T), contiguous,
    and what these tokens add to the table's gradient, d_table (B, H, FLOWS, tiles, 2, parts D).
    """
    PARTS: tl.constexpr = parts_of(MAP)
    BD: tl.constexpr = BF // PARTS
    F: tl.constexpr = PARTS * D
    FAST: tl.constexpr = is_short(x.dtype.element_ty)
    tiles = tl.cdiv(T, BT)
    program = tl.program_id(0)
    tile, head = program % tiles, (program // tiles).to(tl.int64)
    b, h = head // H, head % H
    row, channel = tile * BT + tl.arange(0, BT), tl.arange(0, BD)
    keep = row < T
    kept = keep[:, None] & (channel < D)[None, :]
    at = x + b * x_b + h * x_h + row.to(tl.int64)[:, None] * x_t + channel.to(tl.int64)[None, :] * x_d
    raw = tl.load(at, mask=kept, other=0.0)
    factor = load_token(token + b * token_b + h // TOKEN_GROUP * token_h, token_t, tile * BT, keep, HAS_TOKEN, BT)
    sum_x, sum_token = tl.zeros((BT, BD), tl.float32), tl.zeros((BT,), tl.float32)
    for flow in tl.static_range(FLOWS):
        params = load_table(table + b * table_b + (h // TABLE_GROUP * FLOWS + flow) * table_h, MAP, D, BD)
        core, second, side = map_tile(raw, kept, params, factor, MAP, FAST, D, BT, BD)
        base = d_out + b * out_b + (h * FLOWS + flow) * out_h + row.to(tl.int64)[:, None] * out_t
        g = tl.load(base + channel[None, :], mask=kept, other=0.0).to(tl.float32)
        g_second = g
        if PARTS == 2:
            g_second = tl.load(base + D + channel[None, :], mask=kept, other=0.0).to(tl.float32)
        if one_sided(MAP):
            g = tl.where(side < 0, g_second, g)
        to_x, to_token, g, g_second = tile_grad(
            raw, core, second, side, g, g_second, params, factor, kept, MAP, FAST, HAS_TOKEN, BT, BD
        )
        sum_x += to_x
        sum_token += to_token
        if learns_table(MAP):
            to_a, to_b = table_terms(raw, core, side, g, g_second, params, MAP, FAST, BT, BD)
            part = d_table + ((head * FLOWS + flow) * tiles + tile) * (2 * F)
            store_table_grad(part, tl.sum(to_a, 0), tl.sum(to_b, 0), params, MAP, D, BD)
    at = dx + (head * T + row)[:, None] * D + channel[None, :]
    tl.store(at, sum_x.to(dx.dtype.element_ty), mask=keep[:, None] & (channel < D)[None, :])
    if HAS_TOKEN:
        tl.store(d_token + head * T + row, sum_token, mask=keep)
