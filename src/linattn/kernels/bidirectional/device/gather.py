# mypy: ignore-errors
"""Sums over one segment of the sequence: S = sum_t x_t (w_t y_t)^T and z = sum_t d_t x_t; for long sequences.

Forward: x = psi, y = v, w = d = 1. Backward of wide heads: x = phi, y = do, w = 1 / n, d = delta.

x (B, G H_kv, T, D), y (B, G H_kv, T, FLOWS V) strided; scale, delta (B, G H_kv, T) contiguous fp32; mask (B, T) uint8;
partial (segments, N, H_kv FLOWS, K V + K) contiguous fp32, S row by row, then z. N = B, or sequences when packed.
Grid: N H_kv FLOWS segments, times tiles of K and of V: each program sums a tile (BK, BV). Features that are made here
(see features) come from keys, G = 1, whose sums are not weighted; their tile is the whole.
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import (
    NARROW,
    as_operand,
    first_column,
    times,
    times_exactly,
    times_wide,
)
from linattn.kernels.bidirectional.device.features import FOLD, folded, head_of, load_mapped
from linattn.kernels.bidirectional.device.memory import segment_of, visible
from linattn.kernels.maps.device.functions import load_table


@triton.jit(do_not_specialize=["T", "N", "H_kv", "G", "segments"])
def bidirectional_gather(
    x, y, scale, delta, mask, cu_seqlens, partial, table, token, constant,
    x_b, x_h, x_t, x_d, y_b, y_h, y_t, y_d, mask_b, mask_t,
    table_b, table_h, table_f, token_b, token_h, token_t,
    N, H_kv, G, T, segments,
    WEIGHTED: tl.constexpr, KEYS: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr,
    MAP: tl.constexpr, TOKEN: tl.constexpr, CONSTANT: tl.constexpr, FLOWS: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = x.dtype.element_ty == tl.float32
    # Gradients of an output in fp32, beside queries in 16 bits.
    MIXED: tl.constexpr = x.dtype.element_ty != y.dtype.element_ty
    F: tl.constexpr = K - CONSTANT
    P: tl.constexpr = F // PARTS
    TILES_K: tl.constexpr = (P + BK - 1) // BK
    TILES: tl.constexpr = TILES_K * ((V + BV - 1) // BV)
    # Sums of features that are made or weighted in the loop stay in registers: narrow products of them came out wrong
    # on Hopper (Triton 3.6).
    REGISTERS: tl.constexpr = IEEE or MAP >= 0
    pid = tl.program_id(0)
    tile, rest = pid % TILES, pid // TILES
    segment, row = rest % segments, (rest // segments).to(tl.int64)
    n, h, f = head_of(row, H_kv, FLOWS)
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    column_k = (tile % TILES_K) * BK + tl.arange(0, BK)
    column_v = (tile // TILES_K) * BV + tl.arange(0, BV)
    x += b * x_b + h * G * x_h
    y += b * y_b + h * G * y_h + f * V * y_d
    mask += b * mask_b
    table += b * table_b + h * table_h + f * table_f
    token += b * token_b + h * token_h
    if WEIGHTED:
        scale += (b * H_kv + h) * G * T
        delta += (b * H_kv + h) * G * T
    ones = first_column(BT, x.dtype.element_ty)
    S, lost = tl.zeros((BK, BV), tl.float32), tl.zeros((BK, BV), tl.float32)
    S2, lost2 = S, lost
    z = tl.zeros((BK, BT if WEIGHTED else NARROW), tl.float32)
    z_rows = tl.zeros((FOLD, BK), tl.float32)
    z2_rows = z_rows
    values_sum, counts = tl.zeros((BV, NARROW), tl.float32), tl.zeros((BT,), tl.float32)
    params = load_table(table, MAP, D, BK)
    steps = tl.arange(0, BT)
    # Without a group no loop: it would keep registers from the one inside it.
    for head in range(0, G if GROUPED else 1):
        g = tl.cast(head, tl.int64)
        for t in range(first, end, BT):
            keep = visible(mask, t, end, mask_t, HAS_MASK, BT)
            start = tl.cast(t, tl.int64)
            if MAP >= 0:
                made, made2, _ = load_mapped(x, t, keep, x_t, x_d, params, token, token_t, MAP, TOKEN, False, D, BT, BK)
                features = tl.trans(made)
            else:
                rows = x + g * x_h + start * x_t + column_k[:, None] * x_d + steps[None, :] * x_t
                features = tl.load(rows, mask=(column_k < P)[:, None] & keep[None, :], other=0.0)
            rows = y + g * y_h + start * y_t + column_v[None, :] * y_d + steps[:, None] * y_t
            values = tl.load(rows, mask=keep[:, None] & (column_v < V)[None, :], other=0.0)
            if WEIGHTED:
                w = tl.load(scale + g * T + t + steps, mask=keep, other=0.0)
                S = times_wide(features, as_operand(values.to(tl.float32) * w[:, None], BF16, IEEE), S, IEEE)
                if KEYS:
                    d = tl.load(delta + g * T + t + steps, mask=keep, other=0.0)
                    z += features.to(tl.float32) * d[None, :]
            elif MIXED:
                S = times_wide(features, as_operand(values.to(tl.float32), BF16, IEEE), S, IEEE)
            else:
                S, lost = times_exactly(features, values, S, lost, IEEE)
                if PARTS == 2:
                    S2, lost2 = times_exactly(tl.trans(made2), values, S2, lost2, IEEE)
                if KEYS:
                    if MAP >= 0:
                        z_rows += folded(made, BT, BK)
                        if PARTS == 2:
                            z2_rows += folded(made2, BT, BK)
                    elif IEEE:
                        z_rows += folded(tl.trans(features), BT, BK)
                    else:
                        z = times(features, ones, z)
                if CONSTANT:
                    values_sum = times(tl.trans(values), ones, values_sum)
                    counts += keep.to(tl.float32)
    partial += (segment.to(tl.int64) * N * H_kv * FLOWS + row) * (K * V + K)
    inside = (column_k < P)[:, None] & (column_v < V)[None, :]
    out = partial + column_k[:, None] * V + column_v[None, :]
    tl.store(out, S, mask=inside)
    if tile < TILES_K:
        z_sum = tl.sum(z_rows, 0) if REGISTERS and not WEIGHTED else tl.sum(z, 1)
        tl.store(partial + K * V + column_k, z_sum, mask=column_k < P)
    if PARTS == 2:
        tl.store(out + P * V, S2, mask=inside)
        tl.store(partial + K * V + P + column_k, tl.sum(z2_rows, 0), mask=column_k < P)
    if CONSTANT:
        c = tl.load(constant)
        tl.store(partial + F * V + column_v, c * tl.sum(values_sum, 1), mask=column_v < V)
        tl.store(partial + K * V + F, c * tl.sum(counts, 0))
