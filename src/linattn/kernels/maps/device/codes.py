# mypy: ignore-errors
"""The codes of feature maps in device code, and what the compiler asks about a map."""

import triton
import triton.language as tl

from linattn.kernels.common.support import MAP_CODES

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
UNIT_SILU = tl.constexpr(MAP_CODES["unit_silu"])


@triton.constexpr_function
def parts_of(MAP):
    """Features per channel: 1 or 2."""
    names = ("split_power", "norm_power", "sign_power", "split_expm1", "softmax_pair", "squares_and_linear")
    return 2 if MAP in [MAP_CODES[name] for name in names] else 1


@triton.constexpr_function
def has_table(MAP):
    """Whether the map reads its table."""
    names = ("identity", "relu", "elu", "softmax_pair", "unit_silu")
    return MAP >= 0 and MAP not in [MAP_CODES[name] for name in names]


@triton.constexpr_function
def learns_table(MAP):
    """Whether the table has a gradient."""
    names = ("identity", "relu", "elu", "softmax_pair", "unit_silu", "norm_power", "sign_power")
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
    return MAP not in [MAP_CODES[name] for name in ("elu", "softmax_pair", "unit_silu", "shifted_power")]
