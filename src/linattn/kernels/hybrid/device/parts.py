# mypy: ignore-errors
# ruff: noqa: SIM108
"""What the kernels of hybrid attention share: tiles of L tokens, and which pairs of a query and a key are exact.

    t, i     positions of queries and keys in their row, one of them as a column
    chunk c  of R tiles; a query of it sees the tokens of the chunks c - BACK .. c in pairs, these are near
    ends     first chunk of queries to which a key is not exact any more because it was chosen; 0: it never was

Rows are a whole number of tiles long, so only columns need masks. Logits are in powers of 2.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of(x, at, x_t, i, e, X: tl.constexpr, BX: tl.constexpr):
    """Tokens at .. at + L of one head: (L, BX), zeros after X columns."""
    p = x + at * x_t + i[:, None] * x_t + e[None, :]
    if X % BX == 0:
        found = tl.load(p)
    else:
        found = tl.load(p, mask=(e < X)[None, :], other=0.0)
    return found


@triton.jit
def matrix_of(x, ex, ew, X: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr):
    """A state (X, W) as (BX, BW), zeros outside."""
    p = x + ex[:, None] * W + ew[None, :]
    if X % BX == 0 and W % BW == 0:
        found = tl.load(p)
    else:
        found = tl.load(p, mask=(ex < X)[:, None] & (ew < W)[None, :], other=0.0)
    return found


@triton.jit
def turned_of(x, ex, ew, X: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr):
    """A state (X, W) as (BW, BX), zeros outside."""
    p = x + ex[None, :] * W + ew[:, None]
    if X % BX == 0 and W % BW == 0:
        found = tl.load(p)
    else:
        found = tl.load(p, mask=(ex < X)[None, :] & (ew < W)[:, None], other=0.0)
    return found


@triton.jit
def exact_pairs(t, i, first, ends, c, window, SLIDING: tl.constexpr, NAMED: tl.constexpr):
    """Of near tokens. Windows of whole chunks cover all of them, sliding ones the latest and those chosen."""
    found = (i <= t) & (i >= first)
    if SLIDING:
        inside = t - i < window
        if NAMED:
            inside = inside | (ends > c)
        found = found & inside
    return found


@triton.jit
def linear_pairs(t, i, first, ends, c, window, NAMED: tl.constexpr):
    """The others of the near ones, of a sliding window."""
    found = (i <= t) & (i >= first) & (t - i >= window)
    if NAMED:
        found = found & (ends <= c)
    return found


@triton.jit
def pair_weights(
    x, x_t, x_at, y, y_t, y_at, i, F: tl.constexpr, BF: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr
):
    """x . y^T over all features: (L, L) for a tile of tokens each."""
    L: tl.constexpr = i.shape[0]
    found = tl.zeros([L, L], tl.float32)
    for f in tl.static_range(0, F, BF):
        e = f + tl.arange(0, BF)
        xs = rows_of(x, x_at, x_t, i, e, F, BF).to(DT)
        ys = rows_of(y, y_at, y_t, i, e, F, BF).to(DT)
        found = tl.dot(xs, tl.trans(ys), found, input_precision=PREC)
    return found
