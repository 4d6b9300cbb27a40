# mypy: ignore-errors
"""What programs of the reflections share: they walk over tokens, each with the channels of all heads side by side."""

import triton
import triton.language as tl

from linattn.ops.reflection.types import SMALLEST_SQUARE

SMALLEST = tl.constexpr(SMALLEST_SQUARE)


@triton.jit
def segment_of(program, T, span):
    """The row of the batch, the number of the segment among all, and its tokens: from, up to."""
    segments = tl.cdiv(T, span)
    start = program % segments * span
    return (program // segments).to(tl.int64), start, tl.minimum(start + span, T)


@triton.jit
def load_tokens(x, row, end, x_h, x_t, x_d, D: tl.constexpr, C: tl.constexpr, BC: tl.constexpr):
    """x (H, T, D) at tokens ``row`` before ``end``, the C = H D channels side by side: (BT, BC) in fp32."""
    channel = tl.arange(0, BC)
    of_channel = (channel // D).to(tl.int64) * x_h + (channel % D).to(tl.int64) * x_d
    at = x + row.to(tl.int64)[:, None] * x_t + of_channel[None, :]
    return tl.load(at, mask=(row < end)[:, None] & (channel < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_tokens(y, value, b, row, end, T, BY_TOKEN: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BC: tl.constexpr):
    """Into y (B, H, T, D), which lies as (B, T, H, D) if BY_TOKEN."""
    channel = tl.arange(0, BC)
    if BY_TOKEN:
        at = y + (b * T + row)[:, None] * C + channel[None, :]
    else:
        head = b * (C // D) + channel // D
        at = y + (head[None, :] * T + row[:, None]) * D + (channel % D)[None, :]
    tl.store(at, value.to(y.dtype.element_ty), mask=(row < end)[:, None] & (channel < C)[None, :])


@triton.jit
def load_normal(w, C: tl.constexpr, BC: tl.constexpr):
    """w (C,), ``2 / |w|^2``, and what the gradient of the latter is to be multiplied with: 0 where |w|^2 is bounded."""
    channel = tl.arange(0, BC)
    normal = tl.load(w + channel, mask=channel < C, other=0.0).to(tl.float32)
    square = tl.sum(normal * normal, 0)
    twice = 2.0 / tl.maximum(square, SMALLEST)
    return normal, twice, tl.where(square >= SMALLEST, twice * twice, 0.0)


@triton.jit
def reflect(z, w, twice):
    """``z - twice (z.w) w`` and ``z.w``, token by token."""
    along = tl.sum(z * w[None, :], 1)
    return z - (along * twice)[:, None] * w[None, :], along


@triton.jit
def real_tokens(mask, b, row, end, mask_b, mask_t, HAS_MASK: tl.constexpr):
    """Which tokens are before the end and not masked."""
    real = row < end
    if HAS_MASK:
        real = real & (tl.load(mask + b * mask_b + row.to(tl.int64) * mask_t, mask=real, other=0) != 0)
    return real


@triton.jit
def fold(x, W: tl.constexpr):
    """Sum of every W-th row, (BT, BC) -> (W, BC): rows of one thread, so that no warp waits for another."""
    return tl.sum(tl.reshape(x, (x.shape[0] // W, W, x.shape[1])), 0)
