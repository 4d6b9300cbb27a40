# mypy: ignore-errors
"""The 2 x 2 matrices of pairs of channels from angles and variances, and the gradients of both."""

import triton
import triton.language as tl

from linattn.ops.reflection.types import EPS

SMALL = tl.constexpr(EPS)
HALF_TURN = tl.constexpr(1.5707963267948966)


@triton.jit
def _tanh(x):
    """A quotient of exponentials loses digits near 0; there the series, whose next term is below a rounding."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - shrunk) / (1.0 + shrunk)
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))


@triton.jit
def _modulation(variance, amplitude, gain, bias, b, pair, there, P):
    """``log(var + eps)``, ``tanh(gain log + bias)``, ``tanh(amplitude)`` and the gain."""
    value = tl.load(variance + b[:, None] * P + pair[None, :], mask=there, other=0.0).to(tl.float32)
    height = _tanh(tl.load(amplitude + pair, mask=pair < P, other=0.0).to(tl.float32))[None, :]
    slope = tl.load(gain + pair, mask=pair < P, other=0.0).to(tl.float32)[None, :]
    offset = tl.load(bias + pair, mask=pair < P, other=0.0).to(tl.float32)[None, :]
    log = tl.log(value + SMALL)
    return value + SMALL, log, _tanh(slope * log + offset), height, slope


@triton.jit
def _turn(angles, shift, pair, P, R: tl.constexpr):
    """Cosine and sine of twice the last angle with its shift; of two, of twice what it is beyond the first."""
    last = tl.load(angles + (R - 1) * P + pair, mask=pair < P, other=0.0).to(tl.float32)
    angle = 2.0 * (last[None, :] + shift)
    cos, sin = tl.cos(angle), tl.sin(angle)
    if R == 2:
        first = 2.0 * tl.load(angles + pair, mask=pair < P, other=0.0).to(tl.float32)[None, :]
        cos_first, sin_first = tl.cos(first), tl.sin(first)
        cos, sin = cos * cos_first + sin * sin_first, sin * cos_first - cos * sin_first
    return cos, sin


@triton.jit(do_not_specialize=["B"])
def pair_forward(
    variance, angles, amplitude, gain, bias, table, B, P, HAS_VARIANCE: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, BB: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """variance (B, P), angles (R, P), the others (P,), P = H D/2 -> table (B, H, 2, D): own and other.

    One reflection is ``-[[cos, sin], [sin, -cos]]`` of twice its angle, two are ``[[cos, -sin], [sin, cos]]``.
    """
    columns = tl.cdiv(P, BP)
    program = tl.program_id(0)
    b = (program // columns * BB + tl.arange(0, BB)).to(tl.int64)
    pair = program % columns * BP + tl.arange(0, BP)
    there = (b < B)[:, None] & (pair < P)[None, :]
    shift = tl.zeros((BB, BP), tl.float32)
    if HAS_VARIANCE:
        _, _, turn, height, _ = _modulation(variance, amplitude, gain, bias, b, pair, there, P)
        shift += HALF_TURN * height * turn
    cos, sin = _turn(angles, shift, pair, P, R)
    first = cos
    other = sin
    if R == 1:
        first = -cos
        other = -sin
    half: tl.constexpr = D // 2
    at = table + b[:, None] * (4 * P) + (pair // half * (2 * D) + pair % half * 2)[None, :]
    tl.store(at, first, mask=there)
    tl.store(at + 1, cos, mask=there)
    tl.store(at + D, -sin, mask=there)
    tl.store(at + D + 1, other, mask=there)


@triton.jit(do_not_specialize=["B"])
def pair_backward(
    variance, angles, amplitude, gain, bias, d_table, d_variance, shares, B, P, HAS_VARIANCE: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, BB: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """d_table (B, H, 2, D), contiguous -> d_variance (B, P) and what BB rows of the batch add to the other gradients.

    shares (blocks, 4, P): of the last angle, and of amplitude, gain and bias where there is a variance.
    """
    columns = tl.cdiv(P, BP)
    program = tl.program_id(0)
    block = program // columns
    b = (block * BB + tl.arange(0, BB)).to(tl.int64)
    pair = program % columns * BP + tl.arange(0, BP)
    there = (b < B)[:, None] & (pair < P)[None, :]
    shift = tl.zeros((BB, BP), tl.float32)
    if HAS_VARIANCE:
        value, log, turn, height, slope = _modulation(variance, amplitude, gain, bias, b, pair, there, P)
        shift += HALF_TURN * height * turn
    cos, sin = _turn(angles, shift, pair, P, R)
    half: tl.constexpr = D // 2
    at = d_table + b[:, None] * (4 * P) + (pair // half * (2 * D) + pair % half * 2)[None, :]
    first = tl.load(at, mask=there, other=0.0)
    second = tl.load(at + 1, mask=there, other=0.0)
    from_second = tl.load(at + D, mask=there, other=0.0)
    from_first = tl.load(at + D + 1, mask=there, other=0.0)
    if R == 1:
        d_angle = 2.0 * (sin * (first - second) - cos * (from_second + from_first))
    else:
        d_angle = 2.0 * (cos * (from_first - from_second) - sin * (first + second))
    share = shares + block.to(tl.int64) * (4 * P) + pair
    tl.store(share, tl.sum(d_angle, 0), mask=pair < P)
    if HAS_VARIANCE:
        d_shift = HALF_TURN * d_angle
        d_turn = d_shift * height * (1.0 - turn) * (1.0 + turn)
        tl.store(d_variance + b[:, None] * P + pair[None, :], d_turn * slope / value, mask=there)
        d_height = d_shift * turn * (1.0 - height) * (1.0 + height)
        tl.store(share + P, tl.sum(d_height, 0), mask=pair < P)
        tl.store(share + 2 * P, tl.sum(d_turn * log, 0), mask=pair < P)
        tl.store(share + 3 * P, tl.sum(d_turn, 0), mask=pair < P)
