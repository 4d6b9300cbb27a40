# mypy: ignore-errors
# ruff: noqa: SIM102  (a condition known to the compiler stands alone)
"""One chunk of a causal sweep: its tokens' outputs, and the state after it. Names and options: see sweep.

Inside a chunk a pair's weight is exp(f_i - f_j). FACTORED: where no chunk of the walk decays by more than exp(-60), it
is a factor 1 / write_i on the row and write_j on w, the same w that the state takes: no exponential of a pair, and y
goes into both products as it was loaded. The row's factor waits for the output, where what comes from before the chunk
has it too: read_i = keep / write_i. Else (and beyond bf16) the exponentials of all pairs are taken. A key's own weight
goes the same ways: where keys are columns, onto w; where they are rows, into the row's factor.

RESTS: what is rounded to bf16 for a product (state, weights, w with its factor) is multiplied in two parts, value and
rest. The gradient of a decay needs this: it is a difference of dots that two walks make, each with its own rounding.
"""

import triton
import triton.language as tl

from linattn.kernels.causal.device.parts import (
    add_product,
    added_after,
    from_before,
    held_no_longer,
    inside,
    keep_mark,
    rest_by_pairs,
    spread,
    sum_in_parts,
)


@triton.jit
def chunk(
    step, count, S, S_dt, zc, zr,
    x, x_t, y, y_b, y_h, y_t, y_d, w, w_b, w_h, w_t, w_d, u, u_b, u_h, u_t, u_d, xo, yo, wo,
    out, den, prev_den, prev, scale, e, dots, dots_plane, marks, z_marks, gates, plane, keeps, key_mask,
    b, h, hs, row, tile, start, end, T, HS, chunk0, place0, size, eps,
    X: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr, L: tl.constexpr,
    DIV: tl.constexpr, LOOP: tl.constexpr, REVERSE: tl.constexpr, DIAG: tl.constexpr,
    DECAY: tl.constexpr, FACTORED: tl.constexpr, MASK_Y: tl.constexpr, MASK_X: tl.constexpr,
    DEN: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr, EXTRA: tl.constexpr,
    ZCOL: tl.constexpr, ZROW: tl.constexpr, DOTS: tl.constexpr, MARK: tl.constexpr, CK: tl.constexpr,
    ADD: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, SPLIT: tl.constexpr, LEAN: tl.constexpr,
    PARTS: tl.constexpr, WEIGHT_Y: tl.constexpr, WEIGHT_X: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
    FROM_START: tl.constexpr,
):  # fmt: skip
    Z_APART: tl.constexpr = ZCOL and PARTS == 0
    RESTS: tl.constexpr = DOTS > 0 and S_dt.dtype == tl.bfloat16
    # The diagonal is taken out of the dots. Where nothing needs it apart, both walks leave it in, and it cancels.
    TAKE_OUT: tl.constexpr = DIAG == 1 and FACTORED and (DOTS > 1 or SCALE > 0 or WEIGHT_Y + WEIGHT_X > 0)
    COLUMNS: tl.constexpr = SCALE == 2 or WEIGHT_Y > 0  # columns have a factor besides that of the decay
    i = tl.arange(0, L)
    ex = tl.arange(0, BX)
    ew = (tile * BW).to(tl.int32) + tl.arange(0, BW)
    x_ok = ex < X
    w_ok = ew < W
    STRICT: tl.constexpr = DIAG == 2 or (DIAG == 1 and not FACTORED)
    if REVERSE:
        seen = (i[:, None] < i[None, :]) if STRICT else (i[:, None] <= i[None, :])
    else:
        seen = (i[:, None] > i[None, :]) if STRICT else (i[:, None] >= i[None, :])
    c = count - 1 - step if REVERSE else step
    t0 = c.to(tl.int64) * L
    at = start + t0
    ok = i < tl.minimum(end - at, L).to(tl.int32)
    x_rows = ok
    y_rows = ok
    if MASK_X:
        x_rows = ok & (tl.load(key_mask + at + i, mask=ok, other=0) != 0)
    if MASK_Y:
        y_rows = ok & (tl.load(key_mask + at + i, mask=ok, other=0) != 0)
    if MARK and REVERSE:
        if (c % CK == CK - 1) | (c == count - 1):
            keep_mark(S, zr, marks, z_marks, place0 + c // CK, size, ex, ew, h % DIV, X, W, ZROW > 0)
    xv = tl.load(x + t0 * x_t + xo, mask=inside(x_rows, x_ok, X, BX), other=0.0).to(DT)

    read = tl.full([L], 1.0, tl.float32)
    write = tl.full([L], 1.0, tl.float32)
    keep = tl.full([], 1.0, tl.float32)
    if DECAY:
        gate = gates + at + i
        # Beyond the last token there is room to read: a mask of a load made ahead would be carried along, bit by bit.
        write = tl.where(ok, tl.load(gate + (1 if REVERSE else 2) * plane), 1.0)
        keep = tl.load(keeps + chunk0 + c)
        if not FACTORED:
            read = tl.load(gate + (2 if REVERSE else 1) * plane, mask=ok, other=0.0)
            hi = tl.load(gate, mask=ok, other=0.0)
            if SPLIT:
                lo = tl.load(gate + 3 * plane, mask=ok, other=0.0)
    if WEIGHT_Y > 0 or WEIGHT_X > 0:
        weight = tl.where(ok, tl.load(gate + (WEIGHT_Y + WEIGHT_X) * plane), 1.0)
    reading = read
    ei = tl.zeros([L], tl.float32)
    if SCALE == 1 or SCALE == 3:
        r = tl.load(scale + row * T + at + i, mask=ok, other=0.0)
    if SCALE == 1:
        reading = read * r
    if WEIGHT_X > 0:
        reading = read * weight
    if EXTRA == 1:
        ei = tl.load(e + row * T + at + i, mask=ok, other=0.0)
    if FACTORED:
        row_factor = r / write if SCALE == 1 or SCALE == 3 else 1.0 / write
        if WEIGHT_X > 0:
            row_factor = weight / write
    if LEAN:
        held_no_longer(xv)
    sums = tl.zeros([L], tl.float32)
    if DEN and PARTS == 0:
        sums = tl.sum(xv.to(tl.float32) * zc[None, :], axis=1)
        if DECAY:
            sums = sums * (keep if FACTORED else read)
    without = tl.zeros([L], tl.float32)
    uo = i[:, None] * u_t + ew[None, :] * u_d if DOTS > 0 else 0
    acc = tl.zeros([L, BW], tl.float32)
    if LOOP > 1:
        acc, S, zc, zr = from_before(
            xv, S, S_dt, zc, zr, reading, ei, keep, PREC, DECAY, FACTORED, SCALE, EXTRA, Z_APART, ZROW, RESTS
        )
        if DIAG == 1 and not FACTORED:
            own = tl.zeros([L, BW], tl.float32)
        if DOTS >= 2:
            alone = tl.zeros([L], tl.float32)

    # One stage: with several, the last products of a group may still run when the next group's operands come in.
    for group in tl.range(0, LOOP, num_stages=1):
        # Pairs inside the chunk. They come first: in registers a bf16 matrix of weights is less than a sum in fp32.
        hy = hs * LOOP + group
        y_ok = y_rows[None, :] if X == BX else x_ok[:, None] & y_rows[None, :]
        yv = tl.load(y + b * y_b + hy * y_h + at * y_t + yo, mask=y_ok, other=0.0).to(DT)
        wv = tl.load(w + b * w_b + hy * w_h + at * w_t + wo, mask=inside(y_rows, w_ok, W, BW), other=0.0).to(DT)
        if LEAN:
            held_no_longer(yv)
            held_no_longer(wv)
        taken = wv
        # Factors of a column go on w: on P they would take a register for each.
        factor = write
        if SCALE == 2:
            r = tl.load(scale + (b * (HS * LOOP) + hy) * T + at + i, mask=ok, other=0.0)
            factor = write * r
        if WEIGHT_Y > 0:
            factor = write * weight
        whole = wv.to(tl.float32)
        if FACTORED or COLUMNS:
            whole = whole * (factor if FACTORED else (weight if WEIGHT_Y > 0 else r))[:, None]
            taken = whole.to(DT)
        taken_rest = rest_by_pairs(whole, taken) if RESTS else taken
        # All that needs a tile in registers is done at once, before the products take them.
        if ZCOL:
            # Never the sum of a tile as it was loaded: in fp32 Triton 3.6 takes it out of the loop and fails.
            keys = yv.to(tl.float32) if yv.dtype == tl.bfloat16 else tl.where(y_rows[None, :], yv.to(tl.float32), 0.0)
            keys = keys * factor[None, :] if DECAY else keys
            if PARTS == 0:
                more_c = tl.sum(keys, axis=1)
            else:
                kept = zc * keep if DECAY else zc
                if DEN:
                    # x . z is a product too: of columns that add up to z.
                    z_dt = spread(kept if FACTORED else zc, L, DT)
                zc = kept + sum_in_parts(keys, PARTS)
        if ZROW == 1:
            more_r = tl.sum(tl.where(y_rows[:, None], wv.to(tl.float32), 0.0) * factor[:, None], axis=0)
        if EXTRA == 2:
            ej = tl.load(e + (b * (HS * LOOP) + hy) * T + at + i, mask=ok, other=0.0)
            if ZROW == 2:
                more_r = tl.sum(wv.to(tl.float32) * (factor * ej)[:, None], axis=0)
        if DOTS > 0 and (LOOP == 1 or DOTS == 2 or TAKE_OUT):
            uv = tl.load(u + b * u_b + h * u_h + at * u_t + uo, mask=inside(x_rows, w_ok, W, BW), other=0.0)
        if TAKE_OUT:
            on_diagonal = tl.sum(uv.to(tl.float32) * (whole if RESTS else taken.to(tl.float32)), axis=1)
        elif DOTS >= 2:
            on_diagonal = tl.sum(uv.to(tl.float32) * wv.to(tl.float32), axis=1)
        if DEN and PARTS > 0:
            sums = tl.sum(tl.dot(xv, z_dt, input_precision=PREC), axis=1)
            if DECAY and not FACTORED:
                sums = sums * read
        P = tl.dot(xv, yv, input_precision=PREC)
        if EXTRA == 1:
            P = added_after(P, ei[:, None])  # e is needed again below
        if EXTRA == 2:
            P += ej[None, :]
        if DIAG == 1 and not FACTORED:
            diagonal = tl.sum(tl.where(i[:, None] == i[None, :], P, 0.0), axis=1)
            if SCALE > 0:
                diagonal = diagonal * r
            if WEIGHT_Y > 0 or WEIGHT_X > 0:
                diagonal = diagonal * weight
            if LOOP > 1:
                own += diagonal[:, None] * wv.to(tl.float32)
        if DECAY and not FACTORED:
            gap = hi[None, :] - hi[:, None] if REVERSE else hi[:, None] - hi[None, :]
            if SPLIT:
                gap += lo[None, :] - lo[:, None] if REVERSE else lo[:, None] - lo[None, :]
            P = P * tl.exp(tl.where(seen, tl.minimum(gap, 0.0), float("-inf")))
        P = tl.where(seen, P, 0.0)
        if DEN:
            if WEIGHT_Y > 0:
                sums += tl.sum(P * (factor if FACTORED else weight)[None, :], axis=1)
            else:
                sums += tl.sum(P * write[None, :] if FACTORED else P, axis=1)
        if SCALE == 1 and not FACTORED:
            P = P * r[:, None]
        if WEIGHT_X > 0 and not FACTORED:
            P = P * weight[:, None]
        weights = P.to(DT)
        weights_rest = rest_by_pairs(P, weights) if RESTS else weights
        if TAKE_OUT:
            # Taken off again, as it was rounded: then nothing of w has to wait for the product.
            rounded = P if RESTS else weights.to(tl.float32)
            own_weight = tl.sum(tl.where(i[:, None] == i[None, :], rounded, 0.0), axis=1)
            own_weight = own_weight * row_factor
            without -= own_weight * on_diagonal
        if DOTS >= 2:
            # The diagonal's share of u . out, which weights of keys touch too; of several groups, all so far.
            more = (own_weight if FACTORED else diagonal) * on_diagonal
            alone = more if LOOP == 1 else alone + more
            tl.store(dots + dots_plane + row * T + at + i, alone, mask=ok)
        if DOTS == 3:
            # And u . w on it: see correct_denominator.
            alike = on_diagonal / write if FACTORED else on_diagonal
            if WEIGHT_Y > 0 and not FACTORED:
                alike = alike * weight
            tl.store(dots + 2 * dots_plane + row * T + at + i, alike, mask=ok)

        if LOOP == 1:
            acc, S, zc, zr = from_before(
                xv, S, S_dt, zc, zr, reading, ei, keep, PREC, DECAY, FACTORED, SCALE, EXTRA, Z_APART, ZROW,
                RESTS,
            )  # fmt: skip
        acc = tl.dot(weights, taken, acc, input_precision=PREC)
        if RESTS:
            acc = tl.dot(weights_rest, taken, acc, input_precision=PREC)
            if FACTORED or COLUMNS:
                acc = tl.dot(weights, taken_rest, acc, input_precision=PREC)
        if FACTORED and LOOP == 1:
            acc = acc * row_factor[:, None]
        if DOTS > 0 and LOOP == 1:
            # Apart from the case of several groups, or the diagonal would need a tile of its own in registers.
            tl.store(dots + row * T + at + i, without + tl.sum(uv.to(tl.float32) * acc, axis=1), mask=ok)
            if DIAG == 1 and not FACTORED:
                acc += diagonal[:, None] * wv.to(tl.float32)

        # What the chunk leaves behind.
        if Z_APART:
            zc += more_c
        if ZROW == 1 or (ZROW == 2 and EXTRA == 2):
            zr += more_r
        if DECAY and not FACTORED:
            decayed = yv.to(tl.float32) * write[None, :]
            yv = decayed.to(DT)
            if RESTS:
                S = tl.dot(rest_by_pairs(decayed, yv), taken, S, input_precision=PREC)
        S = add_product(yv, taken, S, PREC)
        if RESTS and (FACTORED or COLUMNS):
            S = tl.dot(yv, taken_rest, S, input_precision=PREC)

    # Used in the chunk that made it, the state is waited for: no product is still reading when the next operands
    # arrive in the same place. (An operand that is also summed in registers gets one buffer too few for that.)
    S_dt = S.to(DT)
    if MARK and not REVERSE:
        if (c % CK == CK - 1) | (c == count - 1):
            keep_mark(S, zr, marks, z_marks, place0 + c // CK, size, ex, ew, h % DIV, X, W, ZROW > 0)
    if FACTORED and LOOP > 1:
        acc = acc * row_factor[:, None]
    if DOTS > 0 and LOOP > 1:
        us = tl.load(u + b * u_b + h * u_h + at * u_t + uo, mask=inside(x_rows, w_ok, W, BW), other=0.0)
        tl.store(dots + row * T + at + i, without + tl.sum(us.to(tl.float32) * acc, axis=1), mask=ok)
        if DIAG == 1 and not FACTORED:
            acc += own
    if SIDE_BY_SIDE > 1:
        APART: tl.constexpr = SIDE_BY_SIDE * W
        place = (t0 if FROM_START else at) * APART + i[:, None] * APART + ew[None, :]
    else:  # by heads, from the start of all: as the other way, plain attention took 5 % longer at width 128
        place = (row * T + at) * W + i[:, None] * W + ew[None, :]
    w_rows = inside(ok, w_ok, W, BW)
    if SCALE == 3 and not FACTORED:
        acc = acc * r[:, None]
    if ADD:
        acc += tl.load(prev + place, mask=w_rows, other=0.0).to(tl.float32)
    if DEN:
        if FACTORED:
            sums = sums * row_factor
        if ADD:
            sums += tl.load(prev_den + row * T + at + i, mask=ok, other=0.0)
        if tile == 0:
            tl.store(den + row * T + at + i, sums, mask=ok)
        if NORM == 1:
            acc = acc * (1.0 / (sums + eps))[:, None]
        if NORM == 2:
            acc = acc * (1.0 / tl.maximum(tl.abs(sums), 1.0))[:, None]
    if MASK_X:
        acc = tl.where(x_rows[:, None], acc, 0.0)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=w_rows)
    return S, S_dt, zc, zr
