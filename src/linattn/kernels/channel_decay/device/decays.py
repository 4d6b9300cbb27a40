"""Decays of a chunk: their sums, and the factors they give to queries, keys and states.

Names as in ``parts``; P running sums of the log decay inside a chunk (C, BK), all <= 0. Log decays are in units of
log 2.

A pair's weight is 2^(P_t - P_s) = F_t / F_s, with one factor for each query, ``q F``, and one for each key, ``k / F``:

mild chunks: ``F = 2^(P - P_m)``, m the last token of the first half. While neither half decays by more than 2^-LIMIT,
    both factors stay far inside the range of fp32 and bf16. The scaled queries and keys serve the pairs of the chunk
    and the state alike, which is brought to the middle of the chunk and on to its end by one factor a channel each.
strong chunks: ``q 2^P`` meets the state as it is, ``k 2^(P_C - P)`` is added to it, both at most 1; pairs are left out.
    Kernels that run over chunks side by side (``near``, ``near_grad``) add these. They halve the chunk again and again:
    the later half of a block meets the earlier one at the border r between them, with the sum r..t and the sum
    s+1..r-1, and no sum is a difference of longer sums: a decay of -800 costs its neighbours no digits.

Sums of decays are matrix products with ones. With bf16 inputs the decays have the 11 bits of fp16: a weight 2^-x is
off by less than x 2^-x / 4096. All sums are of the same rounded numbers; otherwise terms of a product would not cancel.
With fp16 inputs decays have 16 bits, in two parts; with fp32 (EXACT) all bits, and all chunks are computed as strong.
"""
# mypy: ignore-errors
# ruff: noqa: SIM108 - conditions at compile time stay apart from those at run time

import triton
import triton.language as tl

from linattn.kernels.channel_decay.device.parts import (
    INTERPRETED,
    add_product,
    live_keys,
    load_rows,
    product,
    product_of_sum,
    spread,
    tokens,
)

LIMIT = tl.constexpr(80.0)
# 2 to it is 0 in fp32. Stronger decays change nothing, and running sums keep more digits without them.
STRONGEST = tl.constexpr(-160.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def power(x):
    """2^x, 0 where that is no normal number: in one instruction where exp2 takes four."""
    if INTERPRETED:
        found = tl.exp2(x)
    else:
        found = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return found


@triton.jit
def load_decay(
    base, mask, stride_t, m_t, chunk, first, end, d, D: tl.constexpr,
    C: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Decays (C, BK) fp32 in units of log 2 and whose they are (C,); ``base`` and ``mask`` at the chunk's first token.

    SHIFT: a token takes the decay of the token before it, the first of a sequence none. Masked tokens have none.
    """
    live = tokens(end, chunk, C)
    if SHIFT:
        live = live & (tl.arange(0, C) > first - chunk)
    live = live_keys(mask - SHIFT * m_t, m_t, live, C, MASKED)
    x = load_rows(base - SHIFT * stride_t, stride_t, live, d, D, C)
    return tl.maximum(x.to(tl.float32) * LOG2_E, STRONGEST), live


@triton.jit
def decay_row(token, first, SHIFT: tl.constexpr):
    """Where the decay of a token lies (see ``load_decay``), or a row beside it where it has none."""
    return token - tl.where(token > first, SHIFT, 0)


@triton.jit
def sums_of(weights, x, EXACT: tl.constexpr):
    """``weights (C, C)`` of 0, 1 and -1 times ``x (C, BK)``, in fp32 or by 16 bits of each x."""
    if EXACT:
        found = tl.dot(weights, x, input_precision="ieee")
    else:
        found = product_of_sum(weights.to(tl.bfloat16), x, tl.bfloat16, "ieee")
    return found


@triton.jit
def rounded(a, EXACT: tl.constexpr, DT: tl.constexpr):
    """Decays with the digits that sums of them have: fp16 beside bf16, else fp32.

    The conversion cannot be done twice: a tile for two products would go to the second one in fp32.
    """
    if tl.bfloat16 == DT:
        if INTERPRETED:
            a = a.to(tl.float16)
        else:
            a = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [a], tl.float16, False, 2)
    elif not EXACT:
        high = a.to(tl.bfloat16).to(tl.float32)
        a = high + (a - high).to(tl.bfloat16).to(tl.float32)
    return a


@triton.jit
def sums_of_decays(weights, a, EXACT: tl.constexpr):
    """``sums_of`` with ``rounded`` decays."""
    if a.dtype == tl.float16:
        found = product(weights.to(tl.float16), a, "ieee")
    else:
        found = sums_of(weights, a, EXACT)
    return found


@triton.jit
def sums_of_decay_columns(weights, a, EXACT: tl.constexpr):
    """``sums_of_decays`` with channels first, (BK, C); ``weights`` (C, C) transposed, ``a`` (C, BK) as it is."""
    if a.dtype == tl.float16:
        found = product(tl.trans(a), weights.to(tl.float16), "ieee")
    elif EXACT:
        found = tl.dot(tl.trans(a), weights, input_precision="ieee")
    else:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        ones = weights.to(tl.bfloat16)
        found = add_product(product(tl.trans(high), ones, "ieee"), tl.trans(low), ones, "ieee")
    return found


@triton.jit
def halves_of(a, C: tl.constexpr):
    """What either half of the chunk decays by, (BK,) each, and the smallest of all these numbers."""
    early = (tl.arange(0, C) < C // 2)[:, None]
    a = a.to(tl.float32)
    first, second = tl.sum(tl.where(early, a, 0.0), 0), tl.sum(tl.where(early, 0.0, a), 0)
    return first, second, tl.min(tl.minimum(first, second))


@triton.jit
def from_middle(t, j, C: tl.constexpr):
    """Weights of decays j in P_t - P_m: 1 from the middle on up to t, -1 after t up to the middle."""
    return tl.where((j >= C // 2) & (j <= t), 1.0, 0.0) - tl.where((j < C // 2) & (j > t), 1.0, 0.0)


@triton.jit
def factors(a, first, second, weakest, C: tl.constexpr, EXACT: tl.constexpr):
    """Exponents of the factors of queries and of keys, (C, BK) each."""
    t, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if EXACT:
        of_queries = sums_of(tl.where(j <= t, 1.0, 0.0), a, EXACT)
        of_keys = sums_of(tl.where(j > t, 1.0, 0.0), a, EXACT)
    else:
        P = sums_of_decays(from_middle(t, j, C), a, EXACT)
        strong = spread(weakest, first) <= -LIMIT
        of_queries = P + tl.where(strong, first, 0.0)[None, :]
        of_keys = tl.where(strong, second, 0.0)[None, :] - P
    return of_queries, of_keys


@triton.jit
def running_columns(a, C: tl.constexpr, EXACT: tl.constexpr):
    """P_t - P_m channels first (BK, C), and ``halves_of`` as its rows lie; ``a`` is (C, BK). EXACT: the latter alone.

    The middle's own column would be 0: the product makes the first half of it. The second half is the last column.
    """
    j, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if EXACT:
        first = tl.sum(a, 0)
        second = tl.zeros_like(first)
        found = tl.zeros((a.shape[1], C), dtype=tl.float32)
    else:
        middle = t == C // 2 - 1
        weights = tl.where(middle, tl.where(j < C // 2, 1.0, 0.0), from_middle(t, j, C))
        found = sums_of_decay_columns(weights, a, EXACT)
        first = tl.sum(tl.where(middle, found, 0.0), 1)
        second = tl.sum(tl.where(t == C - 1, found, 0.0), 1)
        found = tl.where(middle, 0.0, found)
    return found, first, second, tl.min(tl.minimum(first, second))


@triton.jit
def factor_columns(P, a, first, second, weakest, C: tl.constexpr, OF_KEYS: tl.constexpr, EXACT: tl.constexpr):
    """Exponents of the factors of keys, or else of queries, channels first (BK, C); P of ``running_columns``."""
    if EXACT:
        j, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        chosen = (j > t) if OF_KEYS else (j <= t)
        found = sums_of_decay_columns(tl.where(chosen, 1.0, 0.0), a, EXACT)
    else:
        strong = spread(weakest, first) <= -LIMIT
        if OF_KEYS:
            found = tl.where(strong, second, 0.0)[:, None] - P
        else:
            found = P + tl.where(strong, first, 0.0)[:, None]
    return found


@triton.jit
def passage(first, second, weakest, EXACT: tl.constexpr):
    """Factors (BK,) of a state on its way through a chunk whose halves decay by ``first``, then ``second``:

    before products see it, from there until what the chunk brings is added to it, and after that.
    """
    mild = spread(weakest, first) > -LIMIT
    if EXACT:
        mild = spread(weakest, first) > 0.0  # never
    seen = power(tl.where(mild, first, 0.0))
    more = power(tl.where(mild, 0.0, first + second))
    after = power(tl.where(mild, second, 0.0))
    return seen, more, after


@triton.jit
def halves(a, half, C: tl.constexpr, EXACT: tl.constexpr):
    """Blocks of ``2 half`` tokens: which (C,) lie in the later half, pairs (C, C) of one block, decay to the border."""
    r = tl.arange(0, C)
    border = (r // (2 * half)) * (2 * half) + half
    later = r >= border
    after = (r[None, :] >= border[:, None]) & (r[None, :] <= r[:, None])
    before = (r[None, :] > r[:, None]) & (r[None, :] < border[:, None])
    chosen = tl.where(later[:, None], after, before)
    weights = power(tl.minimum(sums_of(tl.where(chosen, 1.0, 0.0), a, EXACT), 0.0))
    same = border[:, None] == border[None, :]
    return later, same, weights
