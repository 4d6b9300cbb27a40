# mypy: ignore-errors
"""Sums over one segment of the sequence: P = sum_t x_t (w_t y_t)^T and p = sum_t d_t x_t; for long sequences.

Forward: x = psi, y = v, w = d = 1. Backward of wide heads: x = phi, y = do, w = 1 / n, d = delta.

x (B, G H_kv, T, K), y (B, G H_kv, T, V) strided; scale, delta (B, G H_kv, T) contiguous fp32; mask (B, T) uint8;
partial (segments, N, H_kv, K V + K) contiguous fp32, P row by row, then p. N = B, or sequences when packed.
Grid: N H_kv segments, times tiles of K and of V: each program sums a tile (BK, BV).
"""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.bidirectional_common import (
    NARROW,
    as_operand,
    first_column,
    segment_of,
    times,
    times_wide,
    visible,
)


@triton.jit(do_not_specialize=["T", "N", "H_kv", "G", "segments"])
def bidirectional_gather(
    x, y, scale, delta, mask, cu_seqlens, partial,
    x_b, x_h, x_t, x_d, y_b, y_h, y_t, y_d, mask_b, mask_t,
    N, H_kv, G, T, segments,
    WEIGHTED: tl.constexpr, KEYS: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = x.dtype.element_ty == tl.float32
    TILES: tl.constexpr = ((K + BK - 1) // BK) * ((V + BV - 1) // BV)
    pid = tl.program_id(0)
    tile, rest = pid % TILES, pid // TILES
    segment, row = rest % segments, (rest // segments).to(tl.int64)
    n, h = row // H_kv, row % H_kv
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    column_k = (tile % ((K + BK - 1) // BK)) * BK + tl.arange(0, BK)
    column_v = (tile // ((K + BK - 1) // BK)) * BV + tl.arange(0, BV)
    x += b * x_b + h * G * x_h
    y += b * y_b + h * G * y_h
    mask += b * mask_b
    if WEIGHTED:
        scale += (b * H_kv + h) * G * T
        delta += (b * H_kv + h) * G * T
    else:
        ones = first_column(BT, x.dtype.element_ty)
    P = tl.zeros((BK, BV), tl.float32)
    # Weighted it is no dot: narrow products with operands made in the loop came out wrong on Hopper (Triton 3.6).
    D = tl.zeros((BK, BT if WEIGHTED else NARROW), tl.float32)
    tiles = tl.cdiv(tl.maximum(end - first, 0), BT)
    steps = tl.arange(0, BT)
    for i in range(0, G * tiles):
        g, t = tl.cast(i // tiles, tl.int64), first + (i % tiles) * BT
        keep = visible(mask, t, end, mask_t, HAS_MASK, BT)
        start = tl.cast(t, tl.int64)
        rows = x + g * x_h + start * x_t + column_k[:, None] * x_d + steps[None, :] * x_t
        features = tl.load(rows, mask=(column_k < K)[:, None] & keep[None, :], other=0.0)
        rows = y + g * y_h + start * y_t + column_v[None, :] * y_d + steps[:, None] * y_t
        values = tl.load(rows, mask=keep[:, None] & (column_v < V)[None, :], other=0.0)
        if WEIGHTED:
            w = tl.load(scale + g * T + t + steps, mask=keep, other=0.0)
            P = times_wide(features, as_operand(values.to(tl.float32) * w[:, None], BF16), P, IEEE)
            if KEYS:
                d = tl.load(delta + g * T + t + steps, mask=keep, other=0.0)
                D += features.to(tl.float32) * d[None, :]
        else:
            P = times(features, values, P)
            if KEYS:
                D = times(features, ones, D)
    partial += (segment.to(tl.int64) * N * H_kv + row) * (K * V + K)
    out = partial + column_k[:, None] * V + column_v[None, :]
    tl.store(out, P, mask=(column_k < K)[:, None] & (column_v < V)[None, :])
    if tile < (K + BK - 1) // BK:
        tl.store(partial + K * V + column_k, tl.sum(D, 1), mask=column_k < K)
