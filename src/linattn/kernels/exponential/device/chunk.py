# mypy: ignore-errors
# ruff: noqa: SIM102  (a condition known to the compiler stands alone)
"""One chunk of a walk of exponential attention: its tokens' outputs and the state after it. Names: walk."""

import triton
import triton.language as tl

from linattn.kernels.causal.device.parts import (
    add_product,
    added_after,
    held_no_longer,
    inside,
    rest_of,
    spread,
    sum_in_parts,
    unpacked,
)


@triton.jit
def added_rows(tile, PARTS: tl.constexpr):
    """(L, BW) to (PARTS, BW), rows that one thread holds into one; without parts to (BW,)."""
    if PARTS > 0:
        found = tl.sum(tl.reshape(tile, (tile.shape[0] // PARTS, PARTS, tile.shape[1])), axis=0)
    else:
        found = tl.sum(tile, axis=0)
    return found


@triton.jit
def in_each_row(z, L: tl.constexpr, DT: tl.constexpr):
    """(PARTS, BW) to (L, BW): the sum of all rows in each, by a product with ones of their value and rest."""
    value = z.to(DT)
    two = tl.permute(tl.join(value, rest_of(z, value)), (0, 2, 1))
    ones = tl.full([L, 2 * z.shape[0]], 1.0, DT)
    return tl.dot(ones, tl.reshape(two, (2 * z.shape[0], z.shape[1])), input_precision="tf32")


@triton.jit
def chunk(
    at, lo, hi, S, S_dt, zc, zr, x, x_t, y, y_t, w, w_t, u, u_t, xo, yo, wo, uo,
    out, den, gates, keep, rows, dots, marks, z_marks, mark0, c, count, tile, end, h,
    X: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr, L: tl.constexpr,
    GROUP: tl.constexpr, ROLE: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, MARK: tl.constexpr,
    CK: tl.constexpr, DOTS: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, LEAN: tl.constexpr, PARTS: tl.constexpr,
    MADE: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    # PART: the chunk is tokens lo to hi of a tile of L, not all of it. EVEN: no tile ends beyond the sequence.
    REVERSE: tl.constexpr = ROLE >= 2
    SUMS: tl.constexpr = ROLE == 0 and not MADE
    # A gradient through the denominator is a small difference of what comes from the state and from its sum of keys,
    # and of what comes from the output: no weight of that one is rounded.
    FROM_STATE: tl.constexpr = "tf32x3" if PREC == "tf32" and ROLE <= 2 else PREC
    OF_WEIGHTS: tl.constexpr = "tf32x3" if PREC == "tf32" and ROLE == 0 else PREC
    i = tl.arange(0, L)
    ex = tl.arange(0, BX)
    ew = (tile * BW).to(tl.int32) + tl.arange(0, BW)
    x_ok = ex < X
    w_ok = ew < W
    ok = i >= 0 if EVEN else at + i < end
    if PART:
        ok = ok & (i >= lo) & (i < hi)
    seen = (i[:, None] <= i[None, :]) if REVERSE else (i[:, None] >= i[None, :])
    y_ok = ok[None, :] if X == BX else x_ok[:, None] & ok[None, :]
    xv = tl.load(x + at * x_t + xo, mask=inside(ok, x_ok, X, BX), other=0.0).to(DT)
    yv = tl.load(y + at * y_t + yo, mask=y_ok, other=0.0).to(DT)
    wv = tl.load(w + at * w_t + wo, mask=inside(ok, w_ok, W, BW), other=0.0).to(DT)
    if LEAN:
        held_no_longer(xv)
        if not SUMS:
            held_no_longer(yv)
    # In pairs: as many numbers as threads are fetched once for all that needs them, fewer once for each.
    pair = (at + i)[:, None] * 2 + tl.arange(0, 2)[None, :]
    mine, lowest = tl.split(tl.load(gates + pair, mask=ok[:, None], other=0.0))
    own = mine
    if ROLE > 0:
        inverse, slope = tl.split(tl.load(rows + pair, mask=ok[:, None], other=0.0))
        if REVERSE:
            own = inverse

    if MADE:
        inverse = tl.load(rows + at + i, mask=ok, other=0.0)
    if SUMS:
        keys = unpacked(yv) * own[None, :]
        more = sum_in_parts(keys, PARTS) if PARTS > 0 else tl.sum(keys, axis=1)
        if PARTS > 0:
            # x . z is a product as wide as others: of columns that add up to z.
            sums = tl.sum(tl.dot(xv, spread(zc, 32, DT), input_precision=PREC), axis=1)
        else:
            sums = tl.sum(xv.to(tl.float32) * zc[None, :], axis=1)
    # Factors of a column go on w: on the scores they would take a register for each. All that needs a tile in
    # registers is done at once, before the products take them.
    whole = unpacked(wv) * own[:, None]
    taken = whole.to(DT)
    if ROLE == 1:
        more = added_rows(whole, PARTS)
    if ROLE == 2:
        more = added_rows(whole * slope[:, None], PARTS)

    # Pairs inside the chunk come first: in registers a bf16 matrix of weights is less than a sum in fp32.
    P = tl.dot(xv, yv, input_precision=PREC)
    if ROLE == 1:
        P = added_after(P, slope[:, None])  # the slope is needed again below
    if ROLE == 2:
        P += slope[None, :]
    P = tl.where(seen, P, 0.0)
    if SUMS:
        sums += tl.sum(P * own[None, :], axis=1)
    weights = P.to(DT)
    if DOTS:
        # Pairs of the chunk with neither weights nor w rounded: the decays' gradient is a long sum that cancels.
        uv = tl.load(u + at * u_t + uo, mask=inside(ok, w_ok, W, BW), other=0.0).to(DT)
        pairs = tl.sum(P * tl.dot(uv, tl.trans(wv), input_precision=PREC) * own[None, :], axis=1)
    acc = tl.dot(xv, S_dt, input_precision=FROM_STATE)
    if PART and DOTS and S_dt.dtype == tl.bfloat16:
        # Where decays are strong, what they change is small beside what cancels: the state in two parts.
        acc = tl.dot(xv, rest_of(S, S_dt), acc, input_precision=PREC)
    if ROLE == 1 or ROLE == 2:
        keys = in_each_row(zr, L, DT) if PARTS > 0 else zr[None, :]
        acc += slope[:, None] * keys if ROLE == 1 else keys
    if DOTS:
        pairs += tl.sum(unpacked(uv) * acc, axis=1)
        tl.store(dots + at + i, pairs * (mine if REVERSE else inverse), mask=ok)
    acc = tl.dot(weights, taken, acc, input_precision=OF_WEIGHTS)
    if SUMS:
        acc = acc * (1.0 / tl.maximum(tl.abs(sums), tl.where(ok, lowest, 1.0)))[:, None]
        if tile == 0:
            tl.store(den + at + i, sums, mask=ok)
    else:
        acc = acc * (mine if REVERSE else inverse)[:, None]
    APART: tl.constexpr = SIDE_BY_SIDE * W
    place = i[:, None] * APART + tl.arange(0, BW)[None, :]
    tl.store(out + at * APART + place, acc.to(out.dtype.element_ty), mask=inside(ok, w_ok, W, BW))

    # What the chunk leaves behind; then what the next one keeps of it, or against time this one.
    S = add_product(yv, taken, S, FROM_STATE)
    if SUMS:
        zc += more
    if ROLE == 1 or ROLE == 2:
        zr += more
    if MARK and not REVERSE:
        if (hi == L) & ((c % CK == CK - 1) | (c == count - 1)) & (h % GROUP == 0):
            p = marks + (mark0 + c // CK) * X * W + ex[:, None] * W + ew[None, :]
            tl.store(p, S, mask=x_ok[:, None] & w_ok[None, :])
            tl.store(z_marks + (mark0 + c // CK) * W + ew, tl.sum(zr, axis=0) if PARTS > 0 else zr, mask=w_ok)
    turn = at + (lo if REVERSE else hi)
    kept = tl.load(keep + turn, mask=turn < end, other=1.0)
    if MARK:
        # Not in a branch: that would copy the state where it is also written, from register to register.
        S = S * kept
        zr = zr * kept
    elif kept != 1.0:
        S = S * kept
        if not MADE:
            zc = zc * kept
            zr = zr * kept
    # Used in the chunk that made it, the state is waited for: no product is still reading when the next operands
    # arrive in the same place.
    return S, S.to(DT), zc, zr
