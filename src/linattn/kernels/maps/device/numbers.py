# mypy: ignore-errors
# ruff: noqa: RET505 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""Numbers that feature maps are made of: powers and their logarithms, rounding to 16 bits, two numbers at a time.

FAST is for 16-bit inputs: instructions that are right to 22 bits. If a selection follows, the compiler rounds numbers
one by one, at the rate of a logarithm; written explicitly here, two numbers take one ordinary instruction.
"""

import triton
import triton.language as tl

from linattn.kernels.common.support import interpreted

INTERPRETED = tl.constexpr(interpreted())
# Said of instructions that are computed once for a tile, not once more for every way it is spread over threads.
PURE = tl.constexpr(False)
# A power of it is 0, and times 0 it is 0 as well.
LOG_OF_ZERO = tl.constexpr(-1e30)
LARGEST = tl.constexpr(3e38)
LOG2_E = tl.constexpr(1.4426950408889634)
MAX_OF_TWO = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0; max.s16x2 $0, $1, zero; }")
LOG_OF_SIZE = tl.constexpr("{ .reg .f32 size; abs.ftz.f32 size, $1; lg2.approx.ftz.f32 $0, size; }")
# The signs of two numbers fill 16 bits each (prmt); what they cover is the second output, the rest the first.
BY_SIGN = tl.constexpr("""{
    .reg .b32 signs;
    cvt.rn.KINDx2.f32 $2, $4, $3;
    prmt.b32 signs, $5, $6, 0xffbb;
    lop3.b32 $0, $2, signs, 0, 0x30;
    and.b32 $1, $2, signs;
}""")
BF16_BY_SIGN = tl.constexpr(BY_SIGN.value.replace("KIND", "bf16"))
FP16_BY_SIGN = tl.constexpr(BY_SIGN.value.replace("KIND", "f16"))


@triton.jit
def log2_of(y, FAST: tl.constexpr):
    """log2 y for y > 0, else something finite. FAST: to 22 bits, and numbers below the normal ones count as 0."""
    if FAST and not INTERPRETED:
        return tl.maximum(short_log2(y), LOG_OF_ZERO)
    else:
        return tl.where(y > 0, tl.log2(tl.where(y > 0, y, 1.0)), LOG_OF_ZERO)


@triton.jit
def short_log2(y):
    """log2 y to 22 bits, -inf at 0."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)


@triton.jit
def log2_of_size(x, FAST: tl.constexpr):
    """log2 |x|, something finite at 0."""
    if FAST and not INTERPRETED:
        log = tl.inline_asm_elementwise(LOG_OF_SIZE, "=f,f", [x], tl.float32, True, 1)
        return tl.maximum(log, LOG_OF_ZERO)
    else:
        return log2_of(tl.abs(x), FAST)


@triton.jit
def short_exp2(x):
    """2^x to 22 bits."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, PURE, 1)


@triton.jit
def short_inverse(y):
    """1 / y to 23 bits, an infinity at 0."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)


@triton.jit
def exp2_of(x, FAST: tl.constexpr):
    """2^x. FAST: to 22 bits."""
    if FAST and not INTERPRETED:
        return short_exp2(x)
    else:
        return tl.exp2(x)


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + exp(-x)). FAST: to 21 bits."""
    if FAST and not INTERPRETED:
        return short_inverse(1.0 + short_exp2(-LOG2_E * x))
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def power(y, p, FAST: tl.constexpr):
    """y^p for y > 0, else 0; p > 0."""
    if FAST and not INTERPRETED:
        return short_exp2(p * short_log2(y))
    else:
        return tl.exp2(p * log2_of(y, FAST))


@triton.jit
def scaled_power(y, factor, p, FAST: tl.constexpr):
    """(y factor)^p for y > 0, else 0; factor, p > 0 are (BT, 1): their logarithm is taken once a row."""
    if FAST and not INTERPRETED:
        return short_exp2(p * short_log2(y) + p * short_log2(factor))
    else:
        return power(y * factor, p, FAST)


@triton.jit
def over(h, y, FAST: tl.constexpr):
    """h / y for an h that is 0 wherever y is."""
    if FAST and not INTERPRETED:
        inverse = short_inverse(y)
        return h * tl.minimum(tl.maximum(inverse, -LARGEST), LARGEST)
    else:
        return h / tl.where(y == 0, 1.0, y)


@triton.jit
def expm1(y):
    """exp(y) - 1 for y >= 0, by its series where the difference would lose digits."""
    series = 1.0 + y * (1 / 8)
    series = 1.0 + y * (1 / 7) * series
    series = 1.0 + y * (1 / 6) * series
    series = 1.0 + y * (1 / 5) * series
    series = 1.0 + y * (1 / 4) * series
    series = 1.0 + y * (1 / 3) * series
    series = 1.0 + y * (1 / 2) * series
    return tl.where(y < 0.5, y * series, tl.exp(y) - 1.0)


@triton.jit
def softmax(logits, inside):
    """Over the channels; logits (BT, BD), inside (1, BD)."""
    logits = tl.where(inside, logits, -float("inf"))
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def positive_part(x):
    """max(x, 0) in the dtype of x; as whole numbers 16-bit floats have the same sign, and two fit one instruction."""
    if x.dtype == tl.float32 or INTERPRETED:
        return tl.maximum(x.to(tl.float32), 0.0).to(x.dtype)
    else:
        bits = x.to(tl.int16, bitcast=True)
        most = tl.inline_asm_elementwise(MAX_OF_TWO, "=r,r", [bits], tl.int16, PURE, 2)
        return most.to(x.dtype, bitcast=True)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x (fp32, or in ``dtype`` already) in ``dtype``."""
    if x.dtype == dtype or dtype == tl.float32 or INTERPRETED:
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        asm: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(asm, "=r,f,f", [x], tl.bfloat16, PURE, 2)
    else:
        asm: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(asm, "=r,f,f", [x], tl.float16, PURE, 2)


@triton.jit
def split_by_sign(x, sign, dtype: tl.constexpr):
    """x in ``dtype`` where the sign is positive, 0 elsewhere; the other way round; and x in ``dtype``.

    x is 0 wherever the sign may be that of -0 or of no number.
    """
    if dtype == tl.float32 or INTERPRETED:
        whole = x.to(dtype)
        nothing = tl.zeros(whole.shape, dtype)
        return tl.where(sign < 0, nothing, whole), tl.where(sign < 0, whole, nothing), whole
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            BF16_BY_SIGN, "=&r,=&r,=&r,f,f,f,f", [x, sign], (tl.bfloat16, tl.bfloat16, tl.bfloat16), PURE, 2
        )
    else:
        return tl.inline_asm_elementwise(
            FP16_BY_SIGN, "=&r,=&r,=&r,f,f,f,f", [x, sign], (tl.float16, tl.float16, tl.float16), PURE, 2
        )
