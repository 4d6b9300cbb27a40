# mypy: ignore-errors
# ruff: noqa: RET505 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""Tiles of the backward programs that serve both flows of split_power: each element's power is computed once.

Flow 1 differs from flow 0 by an exchange of the two parts in channels that are *turned*. Features are those of flow 0,
c in the part that counts. Instead of the features, the state of flow 1 has its parts exchanged: S_1 and dS_1, and y,
which is z with its parts exchanged.
Tiles are transposed, channels by tokens: a thread has two channels of many tokens, so that numbers of a channel (its
parameters, z, the sums over tokens) take two registers, not a row of them. Names end in the flow, then the part.
For 16-bit inputs: in fp32 a sum over both flows would show the digits lost where two gradients cancel.
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import as_operand, inverse_norm, times, times_wide
from linattn.kernels.maps.device.numbers import (
    INTERPRETED,
    PURE,
    exp2_of,
    log2_of_size,
    rounded,
    short_inverse,
    split_by_sign,
)

# The bit of the sign, all over: it chooses between two numbers, or is put on one.
BY_BIT = tl.constexpr("""{
    .reg .b32 bits;
    shr.s32 bits, $1, 31;
    lop3.b32 $0, bits, $3, $2, 0xca;
}""")
WITH_SIGN = tl.constexpr("lop3.b32 $0, $1, $2, 0x80000000, 0x78;")


@triton.jit
def with_sign(c, side):
    """c >= 0, or -c where part 1 counts."""
    if INTERPRETED:
        return tl.where(side < 0, -c, c)
    else:
        return tl.inline_asm_elementwise(WITH_SIGN, "=f,f,f", [c, side], tl.float32, True, 1)


@triton.jit
def load_columns(base, t0, keep, stride_t, stride_d, BT: tl.constexpr, BD: tl.constexpr):
    """Tile (BD, BT) from token t0 on; columns that are not kept are 0."""
    columns = base + (t0 + tl.arange(0, BT)).to(tl.int64)[None, :] * stride_t
    return tl.load(columns + tl.arange(0, BD)[:, None] * stride_d, mask=keep[None, :], other=0.0)


@triton.jit
def store_columns(base, t0, keep, stride_t, x, BT: tl.constexpr, BD: tl.constexpr):
    """The counterpart for outputs, whose channels are contiguous."""
    columns = base + (t0 + tl.arange(0, BT)).to(tl.int64)[None, :] * stride_t + tl.arange(0, BD)[:, None]
    tl.store(columns, rounded(x, base.dtype.element_ty), mask=keep[None, :])


@triton.jit
def in_products_layout(raw, BT: tl.constexpr, BD: tl.constexpr):
    """raw (BD, BT) in fp32 as the result of a dot with 1: spread over the threads as the gradients that it meets."""
    token = tl.arange(0, BT)
    one = tl.where(token[:, None] == token[None, :], 1.0, 0.0).to(raw.dtype)
    return times(raw, one, tl.zeros((BD, BT), tl.float32))


@triton.jit
def power_of(raw, a, b, dtype: tl.constexpr):
    """Of raw (BD, BT): the features of both parts in ``dtype``, and side = b x, log2 |b x| and c (rounded) in fp32.

    a and b are (BD, 1). side is negative where part 1 counts.
    """
    side = raw.to(tl.float32) * b
    log = log2_of_size(side, True)
    first, second, whole = split_by_sign(exp2_of(a * log, True), side, dtype)
    return first, second, side, log, whole.to(tl.float32)


@triton.jit
def by_side(side, x, y):
    """x, or y where part 1 counts, by the bit of the sign: sixteen answers to a question would not fit the predicates.

    What becomes of a side of 0, whatever its sign, is multiplied by a feature of 0.
    """
    if INTERPRETED:
        return tl.where(side < 0, y, x)
    else:
        return tl.inline_asm_elementwise(BY_BIT, "=f,f,f,f", [side, x, y], tl.float32, PURE, 1)


@triton.jit
def _add_both(x, y, more_x, more_y):
    return x + more_x, y + more_y


@triton.jit
def sums_of_both(x, y):
    """Sums over the channels: the threads meet once for both."""
    return tl.reduce((x, y), 0, _add_both)


@triton.jit
def inverse_of(den, valid, eps, NORM: tl.constexpr):
    """1 / n; every thread needs it of many tokens, and a step of Newton's costs less than a division."""
    if INTERPRETED:
        return inverse_norm(den, valid, eps, NORM)
    else:
        n = tl.where(valid, den + eps if NORM == 1 else tl.maximum(tl.abs(den), 1.0), 1.0)
        inverse = short_inverse(n)
        return inverse + inverse * (1.0 - n * inverse)


@triton.jit
def kept_sums(x, BT: tl.constexpr, BD: tl.constexpr):
    """Sums (BD, 4) over the tokens of x (BD, BT) that one thread has of a product's result."""
    return tl.sum(tl.sum(tl.reshape(x, (BD, BT // 8, 4, 2)), 3), 1)


@triton.jit
def operands(S, BF16: tl.constexpr):
    """S (fp32) in two parts, value and remainder."""
    high = as_operand(S, BF16, False)
    low = as_operand(S - high.to(tl.float32), BF16, False)
    return high, low


@triton.jit
def from_both(x, y, high, low, SPLIT: tl.constexpr):
    """x + S y for S in two parts."""
    x = times_wide(high, y, x, False)
    if SPLIT:
        x = times_wide(low, y, x, False)
    return x
