# mypy: ignore-errors
# ruff: noqa: RET505, SIM108 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""Products of the bidirectional kernels, and their precision.

Names: BT tokens of a tile; BK, BV features and values padded to a power of two; K, V their true numbers.

``times`` multiplies inputs by inputs in their own dtype with fp32 sums. A state or a weighted row is fp32;
as an operand of the tensor core it becomes, by the dtype of the inputs,
    bf16: two bf16 numbers, value and remainder (16 bits; the range is that of fp32);
    fp16: two tf32 numbers, against inputs that are exact in tf32 (22 bits; fp16 itself would overflow above 65504);
    fp32: itself, with exact products, and a state that is summed with its rounding errors carried along.
The gradient of the queries is a difference of terms that nearly cancel: with a rounded state only its error is left.
"""

import triton
import triton.language as tl

from linattn.kernels.common.support import interpreted

# The interpreter multiplies the bit patterns of bf16 numbers: there operands are made fp32 first.
INTERPRETED: tl.constexpr = tl.constexpr(interpreted())
NARROW: tl.constexpr = tl.constexpr(16)  # columns of an operand that carries one or two numbers a row


@triton.jit
def times(a, b, acc):
    """acc + a b for operands of one dtype."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def times_wide(a, b, acc, IEEE: tl.constexpr):
    """acc + a b where one operand may be fp32 and the other an input."""
    if a.dtype == tl.bfloat16 and not INTERPRETED:
        return tl.dot(a, b, acc)
    elif IEEE or INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32")


@triton.jit
def times_exactly(a, b, acc, lost, IEEE: tl.constexpr):
    """acc + a b for operands of one dtype; in fp32 ``lost`` carries what the sums before could not hold (Kahan)."""
    if IEEE:
        new = tl.dot(a, b, input_precision="ieee") - lost
        total = acc + new
        return total, (total - acc) - new
    else:
        return times(a, b, acc), lost


@triton.jit
def nearest_tf32(x):
    """x (fp32) with the 10 bits of tf32, rounded: the tensor core itself would cut off, always towards 0."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def as_operand(x, BF16: tl.constexpr, IEEE: tl.constexpr):
    """x (fp32) as an operand beside inputs: bf16, tf32 or itself."""
    if BF16:
        return x.to(tl.bfloat16)
    elif IEEE:
        return x
    else:
        return nearest_tf32(x)


@triton.jit
def remainder(x, BF16: tl.constexpr, IEEE: tl.constexpr):
    """What ``as_operand`` lost."""
    if BF16:
        return (x - x.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
    elif IEEE:
        return x
    else:
        return nearest_tf32(x - nearest_tf32(x))


@triton.jit
def pair(x, BF16: tl.constexpr, IEEE: tl.constexpr):
    """x (N,) fp32 as an operand (N, 16): value and remainder in two columns, to be summed after the product."""
    column = tl.arange(0, NARROW)[None, :]
    high = x.to(tl.bfloat16).to(tl.float32)
    both = tl.where(column == 0, high[:, None], tl.where(column == 1, (x - high)[:, None], 0.0))
    return as_operand(both, BF16, IEEE)


@triton.jit
def denominator(queries, zs, BT: tl.constexpr):
    """phi_t . z (BT,) by a narrow product with ``zs = pair(z)``.

    Not for features that are made in the loop: such narrow products came out wrong on Hopper (Triton 3.6). Those, and
    fp32, are summed in registers.
    """
    return tl.sum(times_wide(queries, zs, tl.zeros((BT, NARROW), tl.float32), False), 1)


@triton.jit
def first_column(BT: tl.constexpr, dtype: tl.constexpr):
    """(BT, 16) ones in column 0: x^T times it sums the rows of x on the tensor core."""
    column = tl.arange(0, NARROW)[None, :] + tl.zeros((BT, NARROW), tl.int32)
    return tl.where(column == 0, 1.0, 0.0).to(dtype)


@triton.jit
def from_state(
    grads, high, low, SPLIT: tl.constexpr, IEEE: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """grads S^T (BT, BK) from kv^T as operands."""
    u = times_wide(grads, high, tl.zeros((BT, BK), tl.float32), IEEE)
    if SPLIT and not IEEE:
        u = times_wide(grads, low, u, IEEE)
    return u


@triton.jit
def add_weighted(
    queries, grads, scale, dS, NORM: tl.constexpr, TURNED: tl.constexpr, BF16: tl.constexpr, IEEE: tl.constexpr
):  # fmt: skip
    """dS (BK, BV) + sum_t phi_t (do_t / n_t)^T, or its transpose if TURNED.

    TURNED is for queries that are made of the result of a dot: they must not be transposed for another one.
    """
    if TURNED:
        rows = queries
        if NORM != 0:
            rows = as_operand(queries.to(tl.float32) * scale[:, None], BF16, IEEE)
        return times_wide(tl.trans(grads), rows, dS, IEEE)
    else:
        rows = grads
        if NORM != 0:
            rows = as_operand(grads.to(tl.float32) * scale[:, None], BF16, IEEE)
        return times_wide(tl.trans(queries), rows, dS, IEEE)


@triton.jit
def key_grads(
    keys, values, high, low, TURNED: tl.constexpr, SPLIT: tl.constexpr, IEEE: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dpsi = dS v (BT, BK) and dv = dS^T psi (BT, BV), from dS (BK, BV) as operands, or dS^T if TURNED."""
    if TURNED:
        keys_t = tl.trans(keys)
        d_keys = times_wide(values, high, tl.zeros((BT, BK), tl.float32), IEEE)
        d_values = times_wide(high, keys_t, tl.zeros((BV, BT), tl.float32), IEEE)
        if SPLIT and not IEEE:
            d_keys = times_wide(values, low, d_keys, IEEE)
            d_values = times_wide(low, keys_t, d_values, IEEE)
        return d_keys, tl.trans(d_values)
    else:
        values_t = tl.trans(values)
        d_keys = times_wide(high, values_t, tl.zeros((BK, BT), tl.float32), IEEE)
        d_values = times_wide(keys, high, tl.zeros((BT, BV), tl.float32), IEEE)
        if SPLIT and not IEEE:
            d_keys = times_wide(low, values_t, d_keys, IEEE)
            d_values = times_wide(keys, low, d_values, IEEE)
        return tl.trans(d_keys), d_values


@triton.jit
def inverse_norm(den, valid, eps, NORM: tl.constexpr):
    """1 / n, rounded to nearest: dq takes it against its own square. 1 for rows past the end, whose zeros must stay."""
    if NORM == 1:
        n = den + eps
    else:
        n = tl.maximum(tl.abs(den), 1.0)
    return tl.div_rn(tl.full(n.shape, 1.0, tl.float32), tl.where(valid, n, 1.0))


@triton.jit
def norm_slope(den, NORM: tl.constexpr):
    """d n / d den; at abs(den) = 1 it is that of torch.clamp, which lets the gradient through."""
    if NORM == 1:
        return tl.full(den.shape, 1.0, tl.float32)
    else:
        return tl.where(tl.abs(den) >= 1.0, tl.where(den > 0, 1.0, -1.0), 0.0)
