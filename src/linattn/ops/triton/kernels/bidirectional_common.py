# mypy: ignore-errors
# ruff: noqa: RET505, SIM108 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""Device code that the bidirectional kernels share.

Names: BT tokens of a tile; BK, BV features and values padded to a power of two; K, V their true numbers.

Precision. ``times`` multiplies inputs by inputs in their own dtype with fp32 sums. A state or a weighted row is fp32;
as an operand of the tensor core it becomes, by the dtype of the inputs,
    bf16: two bf16 numbers, value and remainder (16 bits; the range is that of fp32);
    fp16: tf32, against inputs that are exact in tf32 (10 bits; fp16 itself would overflow above 65504);
    fp32: itself, with exact products.
"""

import triton
import triton.language as tl

from linattn.ops.triton.support import interpreted

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
def as_operand(x, BF16: tl.constexpr):
    """x (fp32) as an operand beside inputs: bf16 or still fp32."""
    if BF16:
        return x.to(tl.bfloat16)
    else:
        return x


@triton.jit
def remainder(x, BF16: tl.constexpr):
    """What ``as_operand`` lost."""
    if BF16:
        return (x - x.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
    else:
        return x


@triton.jit
def pair(x, BF16: tl.constexpr):
    """x (N,) fp32 as an operand (N, 16): value and remainder in two columns, to be summed after the product."""
    column = tl.arange(0, NARROW)[None, :]
    high = x.to(tl.bfloat16).to(tl.float32)
    both = tl.where(column == 0, high[:, None], tl.where(column == 1, (x - high)[:, None], 0.0))
    return as_operand(both, BF16)


@triton.jit
def first_column(BT: tl.constexpr, dtype: tl.constexpr):
    """(BT, 16) ones in column 0: x^T times it sums the rows of x on the tensor core."""
    column = tl.arange(0, NARROW)[None, :] + tl.zeros((BT, NARROW), tl.int32)
    return tl.where(column == 0, 1.0, 0.0).to(dtype)


@triton.jit
def bound(D: tl.constexpr, BD: tl.constexpr):
    """Which of BD columns exist."""
    return tl.arange(0, BD) < D


@triton.jit
def load_rows(base, t0, keep, stride_t, stride_d, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Tile (BT, BD) from token t0 on; rows that are not kept are 0."""
    # Made anew for each tile: offsets within a tile that are kept for all loops would take up a third of the registers.
    rows = base + (t0 + tl.arange(0, BT)).to(tl.int64)[:, None] * stride_t
    columns = tl.arange(0, BD)
    mask = keep[:, None] & (columns < D)[None, :] if D < BD else keep[:, None]
    return tl.load(rows + columns[None, :] * stride_d, mask=mask, other=0.0)


@triton.jit
def store_rows(base, t0, keep, stride_t, x, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """The counterpart of ``load_rows`` for outputs, whose columns are contiguous."""
    rows = base + (t0 + tl.arange(0, BT)).to(tl.int64)[:, None] * stride_t
    columns = tl.arange(0, BD)
    mask = keep[:, None] & (columns < D)[None, :] if D < BD else keep[:, None]
    tl.store(rows + columns[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def store_columns(base, t0, keep, stride_t, x, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """``store_rows`` of a tile x (BD, BT) that holds a token in each column."""
    rows = base + (t0 + tl.arange(0, BT)).to(tl.int64)[None, :] * stride_t
    d = tl.arange(0, BD)[:, None]
    mask = keep[None, :] & (d < D) if D < BD else keep[None, :]
    tl.store(rows + d, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def visible(mask, t0, end, stride_t, HAS_MASK: tl.constexpr, BT: tl.constexpr):
    """Which of the keys t0 .. t0 + BT are before the end and not masked."""
    t = t0 + tl.arange(0, BT)
    keep = t < end
    if HAS_MASK:
        keep = keep & (tl.load(mask + t.to(tl.int64) * stride_t, mask=keep, other=0) != 0)
    return keep


@triton.jit
def load_state(state, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """kv (BK, BV) of one flat state."""
    k, v = tl.arange(0, BK)[:, None], tl.arange(0, BV)[None, :]
    return tl.load(state + k * V + v, mask=(k < K) & (v < V), other=0.0)


@triton.jit
def load_state_transposed(state, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """kv^T (BV, BK) of one flat state."""
    k, v = tl.arange(0, BK)[None, :], tl.arange(0, BV)[:, None]
    return tl.load(state + k * V + v, mask=(k < K) & (v < V), other=0.0)


@triton.jit
def load_state_keys(state, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr):
    """z (BK,) of one flat state."""
    k = tl.arange(0, BK)
    return tl.load(state + K * V + k, mask=k < K, other=0.0)


@triton.jit
def store_state(state, kv, z, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    k, v = tl.arange(0, BK), tl.arange(0, BV)
    tl.store(state + k[:, None] * V + v[None, :], kv, mask=(k < K)[:, None] & (v < V)[None, :])
    tl.store(state + K * V + k, z, mask=k < K)


@triton.jit
def inverse_norm(den, valid, eps, NORM: tl.constexpr):
    """1 / n; 1 for rows past the end, whose zeros must stay zeros."""
    if NORM == 1:
        n = den + eps
    else:
        n = tl.maximum(tl.abs(den), 1.0)
    return 1.0 / tl.where(valid, n, 1.0)


@triton.jit
def norm_slope(den, NORM: tl.constexpr):
    """d n / d den; at abs(den) = 1 it is that of torch.clamp, which lets the gradient through."""
    if NORM == 1:
        return tl.full(den.shape, 1.0, tl.float32)
    else:
        return tl.where(tl.abs(den) >= 1.0, tl.where(den > 0, 1.0, -1.0), 0.0)


@triton.jit
def segment_of(n, segment, segments, cu_seqlens, T, PACKED: tl.constexpr, BT: tl.constexpr):
    """Row of the batch, first token and end of a segment of sequence n; segments are whole tiles, the last may be
    empty."""
    if PACKED:
        b = n * 0
        start = tl.load(cu_seqlens + n).to(tl.int32)
        end = tl.load(cu_seqlens + n + 1).to(tl.int32)
    else:
        b = n
        start = segment * 0
        end = start + T
    length = tl.cdiv(tl.cdiv(end - start, BT), segments) * BT
    first = start + segment * length
    return b, first, tl.minimum(first + length, end)
