# mypy: ignore-errors
# ruff: noqa: RET505, SIM109 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""Feature maps as device code: a tile of inputs comes back as features, which never go to memory.

Names: D channels of an input, BD of a tile, a power of two; F = parts D features, part p of channel c in column
p D + c. The two parts of a tile stay two tiles (BT, BD): side by side they would have to change places between threads.
``table`` holds two rows of F numbers, a and b; below, a0 and b0 are their first columns, s is +1 in part 0 and -1 in
part 1, and x' is the other channel of a pair.

    identity            x                               relu        max(x, 0)
    elu                 elu(x) + 1                      pair_relu   max(a x + b x', 0)
    split_power         max(s b x, 0)^a                 split_expm1 exp(min(max(s b x, 0), 32)) - 1
    norm_power          (max(s x, 0) / n)^(a0 (b0 + tanh n)), n = sqrt(|x|^2 + 1e-12)
    sign_power          max(s x, 0)^a0                  softmax_pair softmax(s x) over the channels
    squares             a x^2                           squares_and_linear: a x^2 in part 0, b x in part 1
    shifted_power       a (token (max(x, 0) + 1e-6))^b0

Every map but the last is multiplied by the factor per token, if there is one. A power of 0 is 0, its gradients too.
In a *one-sided* map only one part of a channel is not 0: that one alone is computed, its *core*, with the sign that
says which. There a channel's two b must have one sign; in split_power its two a, and its two b, must be equal: those of
part 0 are read, and get the gradient. FAST is for 16-bit inputs: instructions that are right to 22 bits.
"""

import triton
import triton.language as tl

from linattn.ops.triton.support import MAP_CODES, interpreted

INTERPRETED = tl.constexpr(interpreted())
IDENTITY = tl.constexpr(MAP_CODES["identity"])
RELU = tl.constexpr(MAP_CODES["relu"])
ELU = tl.constexpr(MAP_CODES["elu"])
PAIR_RELU = tl.constexpr(MAP_CODES["pair_relu"])
SPLIT_POWER = tl.constexpr(MAP_CODES["split_power"])
NORM_POWER = tl.constexpr(MAP_CODES["norm_power"])
SIGN_POWER = tl.constexpr(MAP_CODES["sign_power"])
SPLIT_EXPM1 = tl.constexpr(MAP_CODES["split_expm1"])
SQUARES = tl.constexpr(MAP_CODES["squares"])
SQUARES_AND_LINEAR = tl.constexpr(MAP_CODES["squares_and_linear"])
SOFTMAX_PAIR = tl.constexpr(MAP_CODES["softmax_pair"])
SHIFTED_POWER = tl.constexpr(MAP_CODES["shifted_power"])

MAX_OF_TWO = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0; max.s16x2 $0, $1, zero; }")
# Said of instructions that are computed once for a tile, not once more for every way it is spread over threads.
PURE = tl.constexpr(False)
# A power of it is 0, and times 0 it is 0 as well.
LOG_OF_ZERO = tl.constexpr(-1e30)
LARGEST = tl.constexpr(3e38)
LARGEST_EXPONENT = tl.constexpr(32.0)
SMALLEST_SQUARE = tl.constexpr(1e-12)
SHIFT = tl.constexpr(1e-6)


@triton.constexpr_function
def parts_of(MAP):
    """Features per channel: 1 or 2."""
    names = ("split_power", "norm_power", "sign_power", "split_expm1", "softmax_pair", "squares_and_linear")
    return 2 if MAP in [MAP_CODES[name] for name in names] else 1


@triton.constexpr_function
def has_table(MAP):
    """Whether the map reads its table."""
    return MAP >= 0 and MAP not in [MAP_CODES[name] for name in ("identity", "relu", "elu", "softmax_pair")]


@triton.constexpr_function
def learns_table(MAP):
    """Whether the table has a gradient."""
    names = ("identity", "relu", "elu", "softmax_pair", "norm_power", "sign_power")
    return MAP >= 0 and MAP not in [MAP_CODES[name] for name in names]


@triton.constexpr_function
def one_sided(MAP):
    """Whether one of a channel's two features is always 0."""
    return MAP in [MAP_CODES[name] for name in ("split_power", "norm_power", "sign_power", "split_expm1")]


@triton.constexpr_function
def is_short(dtype):
    """Whether numbers have 16 bits."""
    return dtype.primitive_bitwidth == 16


@triton.constexpr_function
def maps_zero_to_zero(MAP):
    """Whether rows that were read as zeros have no features, without a mask."""
    return MAP not in [MAP_CODES[name] for name in ("elu", "softmax_pair", "shifted_power")]


@triton.jit
def log2_of(y, FAST: tl.constexpr):
    """log2 y for y > 0, else something finite. FAST: to 22 bits, and numbers below the normal ones count as 0."""
    if FAST and not INTERPRETED:
        found = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)
        return tl.maximum(found, LOG_OF_ZERO)
    else:
        return tl.where(y > 0, tl.log2(tl.where(y > 0, y, 1.0)), LOG_OF_ZERO)


@triton.jit
def power(y, p, FAST: tl.constexpr):
    """y^p for y > 0, else 0; p > 0."""
    exponent = p * log2_of(y, FAST)
    if FAST and not INTERPRETED:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], tl.float32, PURE, 1)
    else:
        return tl.exp2(exponent)


@triton.jit
def over(h, y, FAST: tl.constexpr):
    """h / y for an h that is 0 wherever y is."""
    if FAST and not INTERPRETED:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)
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
def norm_exponent(x, a0, b0):
    """1 / n, tanh n and the exponent of norm_power, each (BT, 1)."""
    n = tl.sqrt(tl.sum(x * x, 1) + SMALLEST_SQUARE)[:, None]
    shrunk = tl.exp(-2.0 * n)
    tanh = (1.0 - shrunk) / (1.0 + shrunk)
    return 1.0 / n, tanh, a0 * (b0 + tanh)


@triton.jit
def swap_pairs(x, BT: tl.constexpr, BD: tl.constexpr):
    """Columns c and c ^ 1 of x (BT, BD) exchanged: a thread has both."""
    even, odd = tl.split(tl.reshape(x, (BT, BD // 2, 2)))
    return tl.reshape(tl.join(odd, even), (BT, BD))


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
def load_table(table, MAP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """a of part 0, b of both parts (each (1, BD)), a0 and b0; zeros where the map has no table."""
    if has_table(MAP):
        F: tl.constexpr = parts_of(MAP) * D
        channel = tl.arange(0, BD)
        inside = channel < D
        a = tl.load(table + channel, mask=inside, other=0.0)[None, :]
        b = tl.load(table + F + channel, mask=inside, other=0.0)[None, :]
        b_second = b
        if MAP == SPLIT_EXPM1 or MAP == SQUARES_AND_LINEAR:
            b_second = tl.load(table + F + D + channel, mask=inside, other=0.0)[None, :]
        return a, b, b_second, tl.load(table), tl.load(table + F)
    else:
        none = tl.zeros((1, BD), tl.float32)
        return none, none, none, 0.0, 0.0


@triton.jit
def b_of_part(b, b_second, negative, MAP: tl.constexpr):
    """b of the part that counts."""
    if MAP == SPLIT_EXPM1:
        return tl.where(negative, b_second, b)
    else:
        return b


@triton.jit
def load_token(token, token_t, t0, keep, HAS_TOKEN: tl.constexpr, BT: tl.constexpr):
    """(BT, 1) fp32: the factors of these tokens, 1 where there are none."""
    if HAS_TOKEN:
        row = (t0 + tl.arange(0, BT)).to(tl.int64)
        return tl.load(token + row * token_t, mask=keep, other=0.0)[:, None]
    else:
        return tl.full((BT, 1), 1.0, tl.float32)


@triton.jit
def is_negative(x, b, MAP: tl.constexpr):
    """(BT, BD): whether part 1 is the one that counts in a one-sided map."""
    if MAP == SPLIT_POWER or MAP == SPLIT_EXPM1:
        return x * b < 0
    else:
        return x < 0


@triton.jit
def core_of(x, a, b, a0, b0, factor, MAP: tl.constexpr, FAST: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """(BT, BD) features of a map that has one for each channel, or of the part of it that is not 0, from x in fp32.

    b is that of the part that counts, (1, BD) or (BT, BD).
    """
    if MAP == ELU:
        return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif MAP == PAIR_RELU:
        return tl.maximum(a * x + b * swap_pairs(x, BT, BD), 0.0)
    elif MAP == SPLIT_POWER:
        return power(tl.abs(x * b), a, FAST)
    elif MAP == NORM_POWER:
        inverse, _, exponent = norm_exponent(x, a0, b0)
        return power(tl.abs(x) * inverse, exponent, FAST)
    elif MAP == SIGN_POWER:
        return power(tl.abs(x), a0, FAST)
    elif MAP == SPLIT_EXPM1:
        return expm1(tl.minimum(tl.abs(x * b), LARGEST_EXPONENT))
    elif MAP == SQUARES:
        return a * x * x
    else:  # SHIFTED_POWER
        return a * power((tl.maximum(x, 0.0) + SHIFT) * factor, b0, FAST)


@triton.jit
def map_tile(
    raw, kept, params, factor,
    MAP: tl.constexpr, FAST: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Of inputs (BT, BD), 0 where not kept: features, those of part 1, and whether part 1 counts; each (BT, BD).

    Features are fp32, or as the inputs where nothing is computed; 0 where not kept. Without their factors per token,
    but for shifted_power. In a one-sided map the first are the core and the second the same; where the last two have
    no meaning they hold anything. params: of ``load_table``; factor (BT, 1).
    """
    a, b, b_second, a0, b0 = params
    if MAP == IDENTITY:
        return raw, raw, raw
    elif MAP == RELU:
        core = positive_part(raw)
        return core, core, core
    elif parts_of(MAP) == 1 or one_sided(MAP):
        x = raw.to(tl.float32)
        negative = x
        if one_sided(MAP):
            negative = is_negative(x, b, MAP)
            b = b_of_part(b, b_second, negative, MAP)
        core = core_of(x, a, b, a0, b0, factor, MAP, FAST, BT, BD)
        if not maps_zero_to_zero(MAP):
            core = tl.where(kept, core, 0.0)
        return core, core, negative
    elif MAP == SOFTMAX_PAIR:
        x = raw.to(tl.float32)
        inside = (tl.arange(0, BD) < D)[None, :]
        first, second = softmax(x, inside), softmax(-x, inside)
        return tl.where(kept, first, 0.0), tl.where(kept, second, 0.0), x
    else:  # SQUARES_AND_LINEAR
        x = raw.to(tl.float32)
        return a * x * x, b_second * x, x


@triton.jit
def parts_from(core, second, negative, factor, MAP: tl.constexpr, HAS_TOKEN: tl.constexpr, dtype: tl.constexpr):
    """Both parts as operands, from what ``map_tile`` gives, and the core with its factor, all in ``dtype``."""
    if HAS_TOKEN and MAP != SHIFTED_POWER:
        core = core.to(tl.float32) * factor
        second = second.to(tl.float32) * factor
    whole = core.to(dtype)
    if one_sided(MAP):
        nothing = tl.zeros(whole.shape, dtype)
        return tl.where(negative, nothing, whole), tl.where(negative, whole, nothing), whole
    else:
        return whole, second.to(dtype), whole
