# mypy: ignore-errors
"""Device functions of maps whose features are turned by the positions of their tokens."""

import triton
import triton.language as tl

from linattn.kernels.maps.device.codes import parts_of
from linattn.kernels.maps.device.functions import load_token


@triton.jit
def load_inputs(
    x, key_mask, token, b, h, tile, T, x_b, x_h, x_t, x_d, mask_b, mask_t, token_b, token_h, token_t,
    TOKEN_GROUP: tl.constexpr, HAS_TOKEN: tl.constexpr, HAS_MASK: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Tokens of a tile and which of them exist, (BT,); what is seen of inputs, and these, (BT, BD); factors (BT, 1)."""
    row, channel = tile * BT + tl.arange(0, BT), tl.arange(0, BD)
    keep = row < T
    seen = keep
    if HAS_MASK:
        seen = keep & (tl.load(key_mask + b * mask_b + row.to(tl.int64) * mask_t, mask=keep, other=0) != 0)
    kept = seen[:, None] & (channel < D)[None, :]
    at = x + b * x_b + h * x_h + row.to(tl.int64)[:, None] * x_t + channel.to(tl.int64)[None, :] * x_d
    raw = tl.load(at, mask=kept, other=0.0)
    factor = load_token(token + b * token_b + h // TOKEN_GROUP * token_h, token_t, tile * BT, seen, HAS_TOKEN, BT)
    return row, keep, kept, raw, factor


@triton.jit
def load_turns(cos, sin, row, keep, part: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr):
    """Cosines and sines (BT, BD / 2) of these tokens for the pairs of a part; cos, sin (T, W / 2), contiguous."""
    pair = tl.arange(0, BD // 2)
    column = (part * (D // 2) + pair) % (W // 2)
    at = row[:, None] * (W // 2) + column[None, :]
    inside = keep[:, None] & (pair < D // 2)[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def turn_pairs(x, cos, sin, BT: tl.constexpr, BD: tl.constexpr):
    """Neighbouring columns (a, b) of x (BT, BD) as (a cos - b sin, a sin + b cos): a thread has both."""
    a, b = tl.split(tl.reshape(x, (BT, BD // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (BT, BD))


@triton.jit
def load_sums(sums, MAP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Of sums (F,) those of part 0 and of part 1, each (1, BD) fp32."""
    channel = tl.arange(0, BD)
    first = tl.load(sums + channel, mask=channel < D, other=0.0)[None, :]
    second = first
    if parts_of(MAP) == 2:
        second = tl.load(sums + D + channel, mask=channel < D, other=0.0)[None, :]
    return first, second


@triton.jit
def store_sums(into, first, second, MAP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Both parts' tiles (BT, BD), summed over the tokens."""
    channel = tl.arange(0, BD)
    tl.store(into + channel, tl.sum(first, 0), mask=channel < D)
    if parts_of(MAP) == 2:
        tl.store(into + D + channel, tl.sum(second, 0), mask=channel < D)


@triton.jit
def dot_rows(first, second, other, other_second, MAP: tl.constexpr):
    """(BT, 1): products of features with others, or with sums, over all channels."""
    dot = tl.sum(first * other, 1)
    if parts_of(MAP) == 2:
        dot += tl.sum(second * other_second, 1)
    return dot[:, None]
