# mypy: ignore-errors
# ruff: noqa: SIM102  (a condition known to the compiler stands alone)
"""One chunk of a walk of exponential attention: its tokens' outputs and the state after it. Names: exponential_walk."""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.causal_parts import inside


@triton.jit
def chunk(
    at, lo, hi, S, S_dt, zc, zr, x, x_t, y, y_t, w, w_t, u, u_t, xo, yo, wo, uo,
    out, den, column, floor, keep, r, e, dots, marks, z_marks, mark0, c, count, tile, end, h,
    X: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr, L: tl.constexpr,
    GROUP: tl.constexpr, ROLE: tl.constexpr, PART: tl.constexpr, MARK: tl.constexpr, CK: tl.constexpr,
    DOTS: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # PART: the chunk is tokens lo to hi of a tile of L, not all of it.
    REVERSE: tl.constexpr = ROLE >= 2
    i = tl.arange(0, L)
    ex = tl.arange(0, BX)
    ew = (tile * BW).to(tl.int32) + tl.arange(0, BW)
    x_ok = ex < X
    w_ok = ew < W
    ok = at + i < end
    if PART:
        ok = ok & (i >= lo) & (i < hi)
    seen = (i[:, None] <= i[None, :]) if REVERSE else (i[:, None] >= i[None, :])
    y_ok = ok[None, :] if X == BX else x_ok[:, None] & ok[None, :]
    xv = tl.load(x + at * x_t + xo, mask=inside(ok, x_ok, X, BX), other=0.0).to(DT)
    yv = tl.load(y + at * y_t + yo, mask=y_ok, other=0.0).to(DT)
    wv = tl.load(w + at * w_t + wo, mask=inside(ok, w_ok, W, BW), other=0.0).to(DT)
    mine = tl.load(column + at + i, mask=ok, other=0.0)
    if ROLE == 0:
        own = mine
        lowest = tl.load(floor + at + i, mask=ok, other=1.0)
    else:
        inverse = tl.load(r + at + i, mask=ok, other=0.0)
        own = inverse if REVERSE else mine
    if ROLE == 1 or ROLE == 2:
        slope = tl.load(e + at + i, mask=ok, other=0.0)

    # Factors of a column go on w: on the scores they would take a register for each. All that needs a tile in
    # registers is done at once, before the products take them.
    whole = wv.to(tl.float32) * own[:, None]
    taken = whole.to(DT)
    if ROLE == 0:
        sums = tl.sum(xv.to(tl.float32) * zc[None, :], axis=1)
        more = tl.sum(yv.to(tl.float32) * own[None, :], axis=1)
    if ROLE == 1:
        more = tl.sum(whole, axis=0)
    if ROLE == 2:
        more = tl.sum(whole * slope[:, None], axis=0)

    # Pairs inside the chunk come first: in registers a bf16 matrix of weights is less than a sum in fp32.
    P = tl.dot(xv, yv, input_precision=PREC)
    if ROLE == 1:
        P += slope[:, None]
    if ROLE == 2:
        P += slope[None, :]
    P = tl.where(seen, P, 0.0)
    if ROLE == 0:
        sums += tl.sum(P * own[None, :], axis=1)
    weights = P.to(DT)
    if DOTS:
        # Pairs of the chunk with neither weights nor w rounded: the decays' gradient is a long sum that cancels.
        uv = tl.load(u + at * u_t + uo, mask=inside(ok, w_ok, W, BW), other=0.0).to(DT)
        pairs = tl.sum(P * tl.dot(uv, tl.trans(wv), input_precision=PREC) * own[None, :], axis=1)
    acc = tl.dot(xv, S_dt, input_precision=PREC)
    if ROLE == 1:
        acc += slope[:, None] * zr[None, :]
    if ROLE == 2:
        acc += zr[None, :]
    if DOTS:
        pairs += tl.sum(uv.to(tl.float32) * acc, axis=1)
        tl.store(dots + at + i, pairs * mine, mask=ok)
    acc = tl.dot(weights, taken, acc, input_precision=PREC)
    if ROLE == 0:
        acc = acc / tl.maximum(tl.abs(sums), lowest)[:, None]
        if tile == 0:
            tl.store(den + at + i, sums, mask=ok)
    else:
        acc = acc * (mine if REVERSE else inverse)[:, None]
    place = at * W + i[:, None] * W + ew[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside(ok, w_ok, W, BW))

    # What the chunk leaves behind; then what the next one keeps of it, or against time this one.
    S = tl.dot(yv, taken, S, input_precision=PREC)
    if ROLE == 0:
        zc += more
    if ROLE == 1 or ROLE == 2:
        zr += more
    if MARK and not REVERSE:
        if (hi == L) & ((c % CK == CK - 1) | (c == count - 1)) & (h % GROUP == 0):
            p = marks + (mark0 + c // CK) * X * W + ex[:, None] * W + ew[None, :]
            tl.store(p, S, mask=x_ok[:, None] & w_ok[None, :])
            tl.store(z_marks + (mark0 + c // CK) * W + ew, zr, mask=w_ok)
    turn = at + (lo if REVERSE else hi)
    kept = tl.load(keep + turn, mask=turn < end, other=1.0)
    S = S * kept
    if ROLE == 0:
        zc = zc * kept
    if ROLE == 1 or ROLE == 2:
        zr = zr * kept
    # Used in the chunk that made it, the state is waited for: no product is still reading when the next operands
    # arrive in the same place.
    return S, S.to(DT), zc, zr
