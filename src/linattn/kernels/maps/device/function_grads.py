# mypy: ignore-errors
# ruff: noqa: RET505 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""Gradients of the feature maps of ``maps.py``, from a tile's inputs and the features made of them."""

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
    one_sided,
    parts_of,
)
from linattn.kernels.maps.device.functions import (
    LARGEST_EXPONENT,
    SHIFT,
    b_of_part,
    norm_exponent,
    shifted_silu,
    swap_pairs,
)
from linattn.kernels.maps.device.numbers import log2_of, over

LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def core_grad(g, core, x, a, b, a0, b0, MAP: tl.constexpr, FAST: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """dx (BT, BD) of a map as in ``core_of``."""
    if MAP == RELU:
        return tl.where(core > 0, g, 0.0)
    elif MAP == ELU:
        return g * tl.where(x > 0, 1.0, core)
    elif MAP == PAIR_RELU:
        reaches = tl.where(core > 0, g, 0.0)
        return reaches * a + swap_pairs(reaches * b, BT, BD)
    elif MAP == SPLIT_POWER:
        return over(g * core * a, x, FAST)
    elif MAP == NORM_POWER:
        inverse, tanh, exponent = norm_exponent(x, a0, b0, FAST)
        h = g * core
        log = log2_of(tl.abs(x) * inverse, FAST)
        through_exponent = tl.sum(h * log, 1)[:, None] * (LOG_2 * a0 * (1.0 - tanh) * (1.0 + tanh))
        through_norm = tl.sum(h, 1)[:, None] * exponent * inverse
        return over(h, x, FAST) * exponent + x * (inverse * (through_exponent - through_norm))
    elif MAP == SIGN_POWER:
        return over(g * core, x, FAST) * a0
    elif MAP == SPLIT_EXPM1:
        return expm1_slope(g, core, x, b) * tl.where(x * b < 0, -b, b)
    elif MAP == SQUARES:
        return g * 2.0 * a * x
    else:  # SHIFTED_POWER
        return tl.where(x > 0, g * core * b0 / (tl.maximum(x, 0.0) + SHIFT), 0.0)


@triton.jit
def unit_silu_grad(g, x, kept, FAST: tl.constexpr):
    """dx (BT, BD) of unit_silu, from the part of g that is across the features: their length stays 1.

    They are made once more, without rounding: what divided them is not kept.
    """
    shifted, slope, inverse = shifted_silu(x, kept, FAST)
    features = shifted * inverse
    across = g - features * tl.sum(g * features, 1)[:, None]
    return tl.where(kept, across * inverse * slope, 0.0)


@triton.jit
def expm1_slope(g, core, x, b):
    """Gradient of abs(x b) in split_expm1."""
    y = tl.abs(x * b)
    return tl.where((y > 0) & (y <= LARGEST_EXPONENT), g * (core + 1.0), 0.0)


@triton.jit
def tile_grad(
    raw, core, second, side, g, g_second, params, factor, kept,
    MAP: tl.constexpr, FAST: tl.constexpr, HAS_TOKEN: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """From gradients g of the features, g_second of those of part 1 (each (BT, BD) fp32): dx (BT, BD), d_token (BT,).

    The other arguments are those and the results of ``map_tile``; core and second may have been rounded. In a one-sided
    map g is the gradient of the part that counts. Also returns g as ``table_terms`` wants it: times the factor. Rows
    that are not kept give 0.
    """
    a, b, b_second, a0, b0 = params
    d_token = tl.zeros((BT,), tl.float32)
    if MAP == RELU:
        if HAS_TOKEN:
            d_token = tl.sum(g * core.to(tl.float32), 1)
            g = g * factor
        return tl.where(core.to(tl.float32) > 0, g, 0.0), d_token, g, g
    x, core = raw.to(tl.float32), core.to(tl.float32)
    if MAP == IDENTITY:
        g = tl.where(kept, g, 0.0)
        if HAS_TOKEN:
            d_token = tl.sum(g * x, 1)
            g = g * factor
        return g, d_token, g, g
    elif parts_of(MAP) == 1 or one_sided(MAP):
        if one_sided(MAP):
            b = b_of_part(b, b_second, side < 0, MAP)
        if HAS_TOKEN:
            d_token = tl.sum(g * core, 1)
            if MAP == SHIFTED_POWER:
                d_token = over(b0 * d_token, tl.reshape(factor, (BT,)), False)
            else:
                g = g * factor
        if MAP == UNIT_SILU:
            return unit_silu_grad(g, x, kept, FAST), d_token, g, g
        else:
            return core_grad(g, core, x, a, b, a0, b0, MAP, FAST, BT, BD), d_token, g, g
    else:
        second = second.to(tl.float32)
        if MAP == SQUARES_AND_LINEAR:
            g_second = tl.where(kept, g_second, 0.0)
        if HAS_TOKEN:
            d_token = tl.sum(g * core + g_second * second, 1)
            g, g_second = g * factor, g_second * factor
        if MAP == SOFTMAX_PAIR:
            dx = core * (g - tl.sum(g * core, 1)[:, None])
            dx -= second * (g_second - tl.sum(g_second * second, 1)[:, None])
        else:  # SQUARES_AND_LINEAR
            dx = g * (2.0 * a * x) + g_second * b_second
        return dx, d_token, g, g_second


@triton.jit
def table_terms(
    raw, core, side, g, g_second, params,
    MAP: tl.constexpr, FAST: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Two tiles (BT, BD) whose sums over the tokens ``store_table_grad`` takes; g as ``tile_grad`` returns it."""
    _, b, b_second, _, _ = params
    x, core = raw.to(tl.float32), core.to(tl.float32)
    if MAP == PAIR_RELU:
        reaches = tl.where(core > 0, g, 0.0)
        return reaches * x, reaches * swap_pairs(x, BT, BD)
    elif MAP == SPLIT_POWER:
        h = g * core
        return h * log2_of(tl.abs(x * b), FAST), h
    elif MAP == SPLIT_EXPM1:
        to_b = expm1_slope(g, core, x, b_of_part(b, b_second, side < 0, MAP)) * x
        return tl.where(side < 0, 0.0, to_b), tl.where(side < 0, -to_b, 0.0)
    elif MAP == SQUARES:
        return g * x * x, g
    elif MAP == SQUARES_AND_LINEAR:
        return g * x * x, g_second * x
    else:  # SHIFTED_POWER
        return g * core, g


@triton.jit
def store_table_grad(into, first, second, params, MAP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Writes the gradient (2, F) of a table from the sums (BD,) of the terms over the tokens."""
    a, b, _, _, _ = params
    F: tl.constexpr = parts_of(MAP) * D
    channel = tl.arange(0, BD)
    inside = channel < D
    nothing = tl.zeros((BD,), tl.float32)
    a_first, b_first, b_second = first, second, nothing
    if MAP == SPLIT_POWER:  # one pair of numbers serves both parts, its gradient stands in the first
        a_first = first * LOG_2
        b_first = over(second * tl.reshape(a, (BD,)), tl.reshape(b, (BD,)), False)
    elif MAP == SPLIT_EXPM1:
        a_first, b_first, b_second = nothing, first, second
    elif MAP == SQUARES:
        b_first = nothing
    elif MAP == SQUARES_AND_LINEAR:
        b_first, b_second = nothing, second
    elif MAP == SHIFTED_POWER:
        a_first, b_first = over(first, tl.reshape(a, (BD,)), False), nothing
    tl.store(into + channel, a_first, mask=inside)
    tl.store(into + F + channel, b_first, mask=inside)
    if parts_of(MAP) == 2:
        tl.store(into + D + channel, nothing, mask=inside)
        tl.store(into + F + D + channel, b_second, mask=inside)
