# mypy: ignore-errors
"""A feature map with turned features: inputs are read once, turned features written once, unturned ones never."""

import triton
import triton.language as tl

from linattn.kernels.maps.device.codes import is_short, parts_of
from linattn.kernels.maps.device.functions import load_table, map_tile, parts_from
from linattn.kernels.maps.device.numbers import rounded
from linattn.kernels.maps.device.turning import dot_rows, load_inputs, load_sums, load_turns, store_sums, turn_pairs


@triton.jit(do_not_specialize=["T"])
def turned_forward(
    x, z, key_mask, cos, sin, table, token, out, total, eps,
    x_b, x_h, x_t, x_d,  # strides
    mask_b, mask_t, table_b, table_h, token_b, token_h, token_t, out_b, out_h, out_t,
    T, H, TABLE_GROUP: tl.constexpr, TOKEN_GROUP: tl.constexpr, FLOWS: tl.constexpr, GROUP: tl.constexpr,
    MAP: tl.constexpr, HAS_TOKEN: tl.constexpr, HAS_MASK: tl.constexpr, IS_QUERY: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """x (B, H, T, D) -> out (B, H FLOWS, T, F), its channels adjacent; a program does BT tokens of a virtual head.

    Keys: out is R psi, total (B, H FLOWS, tiles, F) what these tokens add to z = sum psi. Queries: z (B, H_kv FLOWS, F)
    is given, and out is R phi / (phi . z + eps). GROUP heads share a key head; virtual heads are ordered by key head,
    flow and head of the group.
    """
    PARTS: tl.constexpr = parts_of(MAP)
    BD: tl.constexpr = BF // PARTS
    F: tl.constexpr = PARTS * D
    tiles = tl.cdiv(T, BT)
    program = tl.program_id(0)
    tile, head = program % tiles, program // tiles
    b, h, flow = (head // (H * FLOWS)).to(tl.int64), (head // FLOWS % H).to(tl.int64), head % FLOWS
    key_head = h // GROUP * FLOWS + flow
    virtual = key_head * GROUP + h % GROUP
    row, keep, kept, raw, factor = load_inputs(
        x, key_mask, token, b, h, tile, T, x_b, x_h, x_t, x_d, mask_b, mask_t, token_b, token_h, token_t,
        TOKEN_GROUP, HAS_TOKEN, HAS_MASK, D, BT, BD,
    )  # fmt: skip
    channel = tl.arange(0, BD)
    inside = channel < D
    params = load_table(table + b * table_b + (h // TABLE_GROUP * FLOWS + flow) * table_h, MAP, D, BD)
    core, other, side = map_tile(raw, kept, params, factor, MAP, is_short(raw.dtype), D, BT, BD)
    first, second, _ = parts_from(core, other, side, factor, MAP, HAS_TOKEN, tl.float32)
    if IS_QUERY:
        z_first, z_second = load_sums(z + (b * (H // GROUP * FLOWS) + key_head) * F, MAP, D, BD)
        inverse = 1.0 / (dot_rows(first, second, z_first, z_second, MAP) + eps)
        first, second = first * inverse, second * inverse
    else:
        store_sums(total + ((b * (H * FLOWS) + virtual) * tiles + tile) * F, first, second, MAP, D, BD)
    base = out + b * out_b + virtual * out_h + row.to(tl.int64)[:, None] * out_t
    written = keep[:, None] & inside[None, :]
    c, s = load_turns(cos, sin, row, keep, 0, D, W, BD)
    tl.store(base + channel[None, :], rounded(turn_pairs(first, c, s, BT, BD), out.dtype.element_ty), mask=written)
    if PARTS == 2:
        if D % W != 0:  # blocks of W channels go on from part to part
            c, s = load_turns(cos, sin, row, keep, 1, D, W, BD)
        turned = rounded(turn_pairs(second, c, s, BT, BD), out.dtype.element_ty)
        tl.store(base + D + channel[None, :], turned, mask=written)
