"""What the kernels of a decay per channel share: where a program stands, loads, sums of decays, scores inside a chunk.

Names: C tokens of a chunk, K and V widths (BK, BV padded tiles of them), t and s tokens (query and key), P running sums
of the log decay inside a chunk (C, BK), all <= 0.

A weight is exp(P_t - P_s). Where a channel decays by less than exp(-LIMIT) over the chunk ("mild"), both factors of
exp(P_t - m) exp(m - P_s), with m half of the chunk's total, stay far inside the range of fp32 and bf16: one matrix
product gives all scores. Else the chunk is halved again and again: the later half of a block meets the earlier one at
the border r between them, exp(sum r..t) exp(sum s+1..r-1), both at most 1, and no sum is a difference of longer sums:
a decay of -800 costs its neighbours no digits. The sweeps do mild chunks and leave pairs of others out; kernels that
run over chunks side by side (``near``, ``near_grad``) add these, so that the sweeps stay short.
"""
# mypy: ignore-errors
# ruff: noqa: SIM108 - conditions at compile time stay apart from those at run time

import triton
import triton.language as tl

from linattn.ops.triton.support import interpreted

# The interpreter multiplies the bit patterns of bf16 numbers: there operands are made fp32 first.
INTERPRETED = tl.constexpr(interpreted())
LIMIT = tl.constexpr(100.0)
# exp of it is 0 in fp32. Stronger decays change nothing, and running sums keep more digits without them.
STRONGEST = tl.constexpr(-110.0)


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """Matrix product, summed in fp32."""
    if INTERPRETED:
        found = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    else:
        found = tl.dot(x, y, input_precision=PRECISION)
    return found


@triton.jit
def add_product(total, x, y, PRECISION: tl.constexpr):
    if INTERPRETED:
        found = tl.dot(x.to(tl.float32), y.to(tl.float32), acc=total, input_precision="ieee")
    else:
        found = tl.dot(x, y, acc=total, input_precision=PRECISION)
    return found


@triton.jit
def spread(x, like):
    """A scalar as a block: the interpreter mistakes the type of a mask made from a scalar comparison."""
    return x + tl.zeros_like(like)


@triton.jit
def place(table, row, segment, T, span, PACKED: tl.constexpr):
    """Tokens [start, end) of a segment, its sequence (0 unless packed) and that sequence's tokens [first, last)."""
    if PACKED:
        start = tl.load(table + segment * 5)
        end = tl.load(table + segment * 5 + 1)
        sequence = tl.load(table + segment * 5 + 2)
        first = tl.load(table + segment * 5 + 3)
        last = tl.load(table + segment * 5 + 4)
    else:
        start = segment * span
        end = tl.minimum(start + span, T)
        sequence = segment * 0
        first = segment * 0
        last = first + T
    return start, end, sequence, first, last


@triton.jit
def load_rows(base, stride_t, stride_d, live, d, D, C: tl.constexpr):
    """(C, BD) from ``base``, the first token of a chunk; 0 where a token (C,) is not live or a column is beyond D.

    The chunk's place is in the 64-bit base, so offsets inside it are small and the same for all chunks.
    """
    offsets = tl.arange(0, C)[:, None] * stride_t + d[None, :] * stride_d
    return tl.load(base + offsets, mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_columns(base, stride_t, stride_d, live, d, D, C: tl.constexpr):
    """``load_rows`` with features first, (BD, C).

    A product that needs such an operand loads it so: what a product gave must not be transposed for another one, which
    some compilers get wrong, and what a decay did to an operand comes out of a product (see ``running``).
    """
    offsets = tl.arange(0, C)[None, :] * stride_t + d[:, None] * stride_d
    return tl.load(base + offsets, mask=live[None, :] & (d < D)[:, None], other=0.0)


@triton.jit
def load_decay_columns(base, stride_t, stride_d, chunk, first, end, d, D, C: tl.constexpr, SHIFT: tl.constexpr):
    """``load_decay`` with channels first, (BK, C)."""
    r = tl.arange(0, C)
    live = r < end - chunk
    if SHIFT:
        live = live & (r > first - chunk)
    x = load_columns(base - SHIFT * stride_t, stride_t, stride_d, live, d, D, C)
    return tl.maximum(x.to(tl.float32), STRONGEST)


@triton.jit
def load_decay(base, stride_t, stride_d, chunk, first, end, d, D, C: tl.constexpr, SHIFT: tl.constexpr):
    """Log decays (C, BK) fp32. SHIFT: a token takes that of the token before it, the first of a sequence none."""
    r = tl.arange(0, C)
    live = r < end - chunk
    if SHIFT:
        live = live & (r > first - chunk)
    x = load_rows(base - SHIFT * stride_t, stride_t, stride_d, live, d, D, C)
    return tl.maximum(x.to(tl.float32), STRONGEST)


@triton.jit
def live_keys(base, stride_t, live, C: tl.constexpr, MASKED: tl.constexpr):
    """Tokens (C,) that are there and that the key mask shows."""
    if MASKED:
        live = live & (tl.load(base + tl.arange(0, C) * stride_t, mask=live, other=0) != 0)
    return live


@triton.jit
def sums_of(chosen, x, EXACT: tl.constexpr):
    """Row t: the sum of ``x (C, BK)`` over the rows that ``chosen (C, C)`` marks, in fp32 or by 16 bits of each x."""
    if EXACT:
        found = tl.dot(tl.where(chosen, 1.0, 0.0), x, input_precision="ieee")
    else:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        ones = tl.where(chosen, 1.0, 0.0).to(tl.bfloat16)
        found = add_product(product(ones, high, "ieee"), ones, low, "ieee")
    return found


@triton.jit
def running(a, C: tl.constexpr, EXACT: tl.constexpr):
    """P (C, BK), what is left of the chunk after each token (C, BK), and the chunk's total (BK,)."""
    r = tl.arange(0, C)
    P = tl.minimum(sums_of(r[:, None] >= r[None, :], a, EXACT), 0.0)
    total = tl.sum(a, 0)
    if EXACT:
        rest = sums_of(r[:, None] < r[None, :], a, EXACT)
    else:
        rest = tl.minimum(total[None, :] - P, 0.0)
    return P, rest, total


@triton.jit
def sums_of_columns(x, chosen, EXACT: tl.constexpr):
    """Column t: the sum of ``x (BK, C)`` over the columns that ``chosen (C, C)`` marks in its column t."""
    if EXACT:
        found = tl.dot(x, tl.where(chosen, 1.0, 0.0), input_precision="ieee")
    else:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        ones = tl.where(chosen, 1.0, 0.0).to(tl.bfloat16)
        found = add_product(product(high, ones, "ieee"), low, ones, "ieee")
    return found


@triton.jit
def running_columns(a, total, C: tl.constexpr, EXACT: tl.constexpr):
    """``running`` with channels first: P and what is left of the chunk after each token, (BK, C)."""
    r = tl.arange(0, C)
    P = tl.minimum(sums_of_columns(a, r[:, None] <= r[None, :], EXACT), 0.0)
    if EXACT:
        rest = sums_of_columns(a, r[:, None] > r[None, :], EXACT)
    else:
        rest = tl.minimum(total[:, None] - P, 0.0)
    return P, rest


@triton.jit
def halves(a, half, C: tl.constexpr, EXACT: tl.constexpr):
    """Blocks of ``2 half`` tokens: which (C,) lie in the later half, pairs (C, C) of one block, decay to the border."""
    r = tl.arange(0, C)
    border = (r // (2 * half)) * (2 * half) + half
    later = r >= border
    after = (r[None, :] >= border[:, None]) & (r[None, :] <= r[:, None])
    before = (r[None, :] > r[:, None]) & (r[None, :] < border[:, None])
    weights = tl.exp(tl.minimum(sums_of(tl.where(later[:, None], after, before), a, EXACT), 0.0))
    same = border[:, None] == border[None, :]
    return later, same, weights


@triton.jit
def around_middle(P, total):
    """exp(P_t - m) and exp(m - P_s) (C, BK) with m half of the total; both 0 unless the chunk is mild."""
    mild = spread(tl.min(total), total) > -LIMIT
    middle = 0.5 * total
    away = tl.where(mild[None, :], tl.exp(P - middle[None, :]), 0.0)
    back = tl.where(mild[None, :], tl.exp(middle[None, :] - P), 0.0)
    return away, back
