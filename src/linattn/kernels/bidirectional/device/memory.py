# mypy: ignore-errors
# ruff: noqa: RET505 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""What the bidirectional kernels read and write: rows of tokens, masks, segments, flat states (S by rows, then z).

Results (B, H, T, W) lie in this order, or in that of (B, T, H, W) where a constant BY_TOKEN says so: with it o_h, o_t
(dq_h, ..), the numbers from head to head and from token to token, are W and H W, else T W and W.
"""

import triton
import triton.language as tl


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
def head_start(row, b, H, T, W: tl.constexpr, BY_TOKEN: tl.constexpr):
    """Where head row = b H + h, h of sequence b, begins in a result (B, H, T, W); as (B, T, H, W) if BY_TOKEN."""
    if BY_TOKEN:
        return (row + b * (T - 1) * H) * W
    else:
        return row * T * W


@triton.jit
def visible(mask, t0, end, stride_t, HAS_MASK: tl.constexpr, BT: tl.constexpr):
    """Which of the keys t0 .. t0 + BT are before the end and not masked."""
    t = t0 + tl.arange(0, BT)
    keep = t < end
    if HAS_MASK:
        keep = keep & (tl.load(mask + t.to(tl.int64) * stride_t, mask=keep, other=0) != 0)
    return keep


@triton.jit
def load_state(state, F: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """kv (BK, BV) of one flat state, its first F rows."""
    k, v = tl.arange(0, BK)[:, None], tl.arange(0, BV)[None, :]
    return tl.load(state + k * V + v, mask=(k < F) & (v < V), other=0.0)


@triton.jit
def load_state_transposed(state, F: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """kv^T (BV, BK) of one flat state, the first F columns."""
    k, v = tl.arange(0, BK)[None, :], tl.arange(0, BV)[:, None]
    return tl.load(state + k * V + v, mask=(k < F) & (v < V), other=0.0)


@triton.jit
def load_state_as(
    state, TURNED: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """kv (BK, BV) of one flat state, or kv^T (BV, BK) if TURNED."""
    if TURNED:
        return load_state_transposed(state, F, V, BK, BV)
    else:
        return load_state(state, F, V, BK, BV)


@triton.jit
def load_vector(x, D: tl.constexpr, BD: tl.constexpr):
    """(BD,) numbers that lie side by side, D of them true: z of a flat state, or its last row."""
    d = tl.arange(0, BD)
    return tl.load(x + d, mask=d < D, other=0.0)


@triton.jit
def store_vector(into, x, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    tl.store(into + d, x, mask=d < D)


@triton.jit
def store_state(
    state, kv, z, at: tl.constexpr, TURNED: tl.constexpr, K: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """P of a flat state's K rows, and of its z, from row ``at`` on; kv (BK, BV), or (BV, BK) if TURNED."""
    k, v = tl.arange(0, BK), tl.arange(0, BV)
    if TURNED:
        into = state + at * V + k[None, :] * V + v[:, None]
        tl.store(into, kv, mask=(k < P)[None, :] & (v < V)[:, None])
    else:
        tl.store(state + at * V + k[:, None] * V + v[None, :], kv, mask=(k < P)[:, None] & (v < V)[None, :])
    store_vector(state + K * V + at, z, P, BK)


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
