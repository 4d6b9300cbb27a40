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
    unit_silu           (silu(x) + 1/2) / n, n the length of that over the channels
    shifted_power       a (token (max(x, 0) + 1e-6))^b0

Every map but the last is multiplied by the factor per token, if there is one. A power of 0 is 0, its gradients too.
In a *one-sided* map only one part of a channel is not 0: that one alone is computed, its *core*, with the sign that
says which. There a channel's two b must have one sign; in split_power its two a, and its two b, must be equal: those of
part 0 are read, and get the gradient. Two flows of split_power must have the same numbers too, but for the signs of b,
which in flow 1 may be others, in all heads of a group alike; a program that serves both gives flow 0 the gradient.
"""

import triton
import triton.language as tl

from linattn.kernels.maps.device.codes import (
    ELU,
    IDENTITY,
    NORM_POWER,
    PAIR_RELU,
    RELU,
    SHIFTED_POWER,
    SIGN_POWER,
    SOFTMAX_PAIR,
    SPLIT_EXPM1,
    SPLIT_POWER,
    SQUARES,
    SQUARES_AND_LINEAR,
    UNIT_SILU,
    has_table,
    maps_zero_to_zero,
    one_sided,
    parts_of,
)
from linattn.kernels.maps.device.numbers import (
    expm1,
    over,
    positive_part,
    power,
    rounded,
    scaled_power,
    sigmoid,
    softmax,
    split_by_sign,
)

LARGEST_EXPONENT = tl.constexpr(32.0)
SMALLEST_SQUARE = tl.constexpr(1e-12)
SHIFT = tl.constexpr(1e-6)


@triton.jit
def norm_exponent(x, a0, b0, FAST: tl.constexpr):
    """1 / n, tanh n and the exponent of norm_power, each (BT, 1)."""
    square = (tl.sum(x * x, 1) + SMALLEST_SQUARE)[:, None]
    if FAST:
        inverse = tl.rsqrt(square)
        n = square * inverse
    else:
        n = tl.sqrt(square)
        inverse = 1.0 / n
    shrunk = tl.exp(-2.0 * n)
    tanh = over(1.0 - shrunk, 1.0 + shrunk, FAST)
    return inverse, tanh, a0 * (b0 + tanh)


@triton.jit
def shifted_silu(x, kept, FAST: tl.constexpr):
    """silu(x) + 1/2, 0 where not kept, and silu'(x), each (BT, BD); the first one's 1 / length, (BT, 1)."""
    gate = sigmoid(x, FAST)
    shifted = tl.where(kept, x * gate + 0.5, 0.0)
    # A row that is kept has a length of at least 0.2: what is added counts in the others alone.
    square = (tl.sum(shifted * shifted, 1) + SMALLEST_SQUARE)[:, None]
    inverse = tl.rsqrt(square) if FAST else 1.0 / tl.sqrt(square)
    return shifted, gate * (1.0 + x * (1.0 - gate)), inverse


@triton.jit
def swap_pairs(x, BT: tl.constexpr, BD: tl.constexpr):
    """Columns c and c ^ 1 of x (BT, BD) exchanged: a thread has both."""
    even, odd = tl.split(tl.reshape(x, (BT, BD // 2, 2)))
    return tl.reshape(tl.join(odd, even), (BT, BD))


@triton.jit
def load_table(table, MAP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """a of part 0, b of both parts (each (1, BD)), a0 and b0; zeros where the map has no table."""
    if has_table(MAP):
        F: tl.constexpr = parts_of(MAP) * D
        channel = tl.arange(0, BD)
        inside = channel < D
        # 0 to the power of 0 is not 0: columns that do not exist have an exponent too.
        a = tl.load(table + channel, mask=inside, other=1.0)[None, :]
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
def side_of(x, b, MAP: tl.constexpr):
    """(BT, BD): negative where part 1 is the one that counts in a one-sided map."""
    if MAP == SPLIT_POWER or MAP == SPLIT_EXPM1:
        return x * b
    else:
        return x


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
        inverse, _, exponent = norm_exponent(x, a0, b0, FAST)
        return scaled_power(tl.abs(x), inverse, exponent, FAST)
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
    """Of inputs (BT, BD), 0 where not kept: features, those of part 1, and a side, < 0 where part 1 counts; (BT, BD).

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
    elif MAP == UNIT_SILU:
        shifted, _, inverse = shifted_silu(raw.to(tl.float32), kept, FAST)
        core = shifted * inverse
        return core, core, core
    elif parts_of(MAP) == 1 or one_sided(MAP):
        x = raw.to(tl.float32)
        side = x
        if one_sided(MAP):
            side = side_of(x, b, MAP)
            b = b_of_part(b, b_second, side < 0, MAP)
        core = core_of(x, a, b, a0, b0, factor, MAP, FAST, BT, BD)
        if not maps_zero_to_zero(MAP):
            core = tl.where(kept, core, 0.0)
        return core, core, side
    elif MAP == SOFTMAX_PAIR:
        x = raw.to(tl.float32)
        inside = (tl.arange(0, BD) < D)[None, :]
        first, second = softmax(x, inside), softmax(-x, inside)
        return tl.where(kept, first, 0.0), tl.where(kept, second, 0.0), x
    else:  # SQUARES_AND_LINEAR
        x = raw.to(tl.float32)
        return a * x * x, b_second * x, x


@triton.jit
def parts_from(core, second, side, factor, MAP: tl.constexpr, HAS_TOKEN: tl.constexpr, dtype: tl.constexpr):
    """Both parts as operands, from what ``map_tile`` gives, and the core with its factor, all in ``dtype``."""
    if HAS_TOKEN and MAP != SHIFTED_POWER:
        core = core.to(tl.float32) * factor
        second = second.to(tl.float32) * factor
    if one_sided(MAP):
        return split_by_sign(core, side, dtype)
    else:
        whole = rounded(core, dtype)
        if parts_of(MAP) == 2:
            return whole, rounded(second, dtype), whole
        else:
            return whole, whole, whole
