# mypy: ignore-errors
# ruff: noqa: SIM108
"""What the causal sweep does with a tile apart from attention.

rows, columns   which tokens and features of a tile are there        S (BX, BW), zr (BW,)  state and its key sums
marks, z_marks, ends                                                 see causal_sweep
"""

import triton
import triton.language as tl


@triton.jit
def inside(rows, columns, width: tl.constexpr, block: tl.constexpr):
    """Mask of a tile; full tiles need none for their columns, and registers are short."""
    if width % block == 0:
        found = rows[:, None]
    else:
        found = rows[:, None] & columns[None, :]
    return found


@triton.jit
def mark(S, zr, marks, z_marks, ends, place, ex, ew, query, X: tl.constexpr, W: tl.constexpr, MARK: tl.constexpr):
    """Keep the state at the end of a stretch of chunks, or multiply its gradient with what was kept."""
    p = marks + place * X * W + ex[:, None] * W + ew[None, :]
    whole = (ex < X)[:, None] & (ew < W)[None, :]
    if MARK == 1:
        if query == 0:
            tl.store(p, S.to(marks.dtype.element_ty), mask=whole)
            if zr is not None:
                tl.store(z_marks + place * W + ew, zr, mask=ew < W)
    else:
        product = tl.sum(tl.sum(S * tl.load(p, mask=whole, other=0.0).to(tl.float32), axis=1), axis=0)
        if zr is not None and z_marks is not None:
            product += tl.sum(zr * tl.load(z_marks + place * W + ew, mask=ew < W, other=0.0), axis=0)
        tl.store(ends + place, product)
