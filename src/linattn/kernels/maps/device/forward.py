# mypy: ignore-errors
"""A feature map on its own: inputs are read once, features written once."""

import triton
import triton.language as tl

from linattn.kernels.maps.device.codes import is_short, parts_of
from linattn.kernels.maps.device.functions import load_table, load_token, map_tile, parts_from


@triton.jit(do_not_specialize=["T"])
def map_forward(
    x, table, token, constant, out,
    x_b, x_h, x_t, x_d,  # strides
    table_b, table_h, token_b, token_h, token_t,
    T, H, TABLE_GROUP: tl.constexpr, TOKEN_GROUP: tl.constexpr, FLOWS: tl.constexpr,
    MAP: tl.constexpr, HAS_TOKEN: tl.constexpr, HAS_CONSTANT: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """x (B, H, T, D) -> out (B, H FLOWS, T, parts D [+ 1]), contiguous; a program does BT tokens of a virtual head.

    TABLE_GROUP virtual heads per flow share a table, TOKEN_GROUP heads share the factors of the tokens.
    """
    PARTS: tl.constexpr = parts_of(MAP)
    BD: tl.constexpr = BF // PARTS
    WIDTH: tl.constexpr = PARTS * D + HAS_CONSTANT
    tiles = tl.cdiv(T, BT)
    program = tl.program_id(0)
    t0, head = (program % tiles) * BT, program // tiles
    b, h, flow = (head // (H * FLOWS)).to(tl.int64), (head // FLOWS % H).to(tl.int64), head % FLOWS
    row, channel = t0 + tl.arange(0, BT), tl.arange(0, BD)
    keep, inside = row < T, channel < D
    kept = keep[:, None] & inside[None, :]
    at = x + b * x_b + h * x_h + row.to(tl.int64)[:, None] * x_t + channel.to(tl.int64)[None, :] * x_d
    raw = tl.load(at, mask=kept, other=0.0)
    params = load_table(table + b * table_b + (h // TABLE_GROUP * FLOWS + flow) * table_h, MAP, D, BD)
    factor = load_token(token + b * token_b + h // TOKEN_GROUP * token_h, token_t, t0, keep, HAS_TOKEN, BT)
    core, other, side = map_tile(raw, kept, params, factor, MAP, is_short(raw.dtype), D, BT, BD)
    first, second, _ = parts_from(core, other, side, factor, MAP, HAS_TOKEN, out.dtype.element_ty)
    base = out + (head.to(tl.int64) * T + row)[:, None] * WIDTH
    tl.store(base + channel[None, :], first, mask=kept)
    if PARTS == 2:
        tl.store(base + D + channel[None, :], second, mask=kept)
    if HAS_CONSTANT:
        last = tl.zeros((BT, 1), tl.float32) + tl.load(constant)
        tl.store(base + (WIDTH - 1), last.to(out.dtype.element_ty), mask=keep[:, None])
