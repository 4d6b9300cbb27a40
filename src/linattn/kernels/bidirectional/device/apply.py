# mypy: ignore-errors
"""y_t = scale_t x_t M + delta_t r, a tile of BN columns per program: the gradients of wide heads.

    dq: x = do, M = S^T, r = z      dk: x = v, M = dS^T, r = dz, scale = delta = 1      dv: x = k, M = dS, no r

x (B, G H_kv, T, D) strided; state (N, H_kv, STATE) contiguous fp32, M[d, n] = state[d M_d + n M_n], r[n] =
state[r_at + n]; scale, delta (B, G H_kv, T) contiguous fp32; mask (B, T) uint8; y (B, G H_kv, T, C), see memory.
Grid: N H_kv segments, times tiles of C.
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import as_operand, remainder, times_wide
from linattn.kernels.bidirectional.device.memory import head_start, load_rows, segment_of, visible


@triton.jit(do_not_specialize=["T", "H_kv", "G", "segments"])
def bidirectional_apply(
    x, state, scale, delta, mask, cu_seqlens, y,
    x_b, x_h, x_t, x_d, mask_b, mask_t, H_kv, G, T, segments,
    STATE: tl.constexpr, M_d: tl.constexpr, M_n: tl.constexpr, r_at: tl.constexpr,
    WEIGHTED: tl.constexpr, ADD: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
    BY_TOKEN: tl.constexpr, BF16: tl.constexpr, IEEE: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (C + BN - 1) // BN
    pid = tl.program_id(0)
    tile, rest = pid % TILES, pid // TILES
    segment, row = rest % segments, (rest // segments).to(tl.int64)
    n, h = row // H_kv, row % H_kv
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    state += row * STATE
    d, column = tl.arange(0, BD), tile * BN + tl.arange(0, BN)
    M = tl.load(
        state + d[:, None] * M_d + column[None, :] * M_n, mask=(d < D)[:, None] & (column < C)[None, :], other=0.0
    )
    high, low = as_operand(M, BF16, IEEE), remainder(M, BF16, IEEE)
    r = tl.load(state + r_at + column, mask=column < C, other=0.0)
    x += b * x_b + h * G * x_h
    y += head_start((b * H_kv + h) * G, b, H_kv * G, T, C, BY_TOKEN)
    y_h, y_t = (C, H_kv * G * C) if BY_TOKEN else (tl.cast(T, tl.int64) * C, C)
    mask += b * mask_b
    if WEIGHTED:
        scale += (b * H_kv + h) * G * T
        delta += (b * H_kv + h) * G * T
    tiles = tl.cdiv(tl.maximum(end - first, 0), BT)
    steps = tl.arange(0, BT)
    for i in range(0, G * tiles):
        g, t = tl.cast(i // tiles, tl.int64), first + (i % tiles) * BT
        keep = visible(mask, t, end, mask_t, HAS_MASK, BT)
        exists = t + steps < end
        rows = load_rows(x + g * x_h, t, keep, x_t, x_d, D, BT, BD)
        if BF16:
            rows = rows.to(tl.bfloat16)
        out = times_wide(rows, high, tl.zeros((BT, BN), tl.float32), IEEE)
        if SPLIT and not IEEE:
            out = times_wide(rows, low, out, IEEE)
        if WEIGHTED:
            out *= tl.load(scale + g * T + t + steps, mask=exists, other=0.0)[:, None]
            out += tl.load(delta + g * T + t + steps, mask=exists, other=0.0)[:, None] * r[None, :]
        elif ADD:
            out += r[None, :]
        if HAS_MASK:
            out = tl.where(keep[:, None], out, 0.0)
        into = y + (g * y_h + tl.cast(t, tl.int64) * y_t) + steps[:, None] * y_t + column[None, :]
        tl.store(into, out.to(y.dtype.element_ty), mask=exists[:, None] & (column < C)[None, :])
