# mypy: ignore-errors
# ruff: noqa: SIM102  (a condition known to the compiler stands alone)
"""One walk along a sequence, chunk by chunk, with the state in registers. It serves forward and backward alike.

    out_i = sum_j M_ij (r (x_i . y_j) + e) w_j          j at or before i; with REVERSE at or after i

    what        x    y    w    r        e       walks                  u, for the decay's gradient
    output      q    k    v    1        0       along                  -
    dq          do   v    k    1/n_i    g_i     along                  q
    dk          v    do   q    1/n_j    g_j     against (REVERSE)      k
    dv          k    q    do   1/n_j    0       against (REVERSE)      -

with the normaliser n and g = d loss / d row sum. In a sweep against time (LION's second one) all four turn round.

    x (B, HX, T, X)   y (B, HX / DIV LOOP, T, X)   w (like y, .., W)   out (B, HX, T, W) contiguous   u like out
    o     (B, HX, T, X)   what forward returned, contiguous          den, g  (B, heads of q, T) fp32
    gates (.., B, HS, T), keeps (.., chunks)   what the decay does inside a chunk, see potentials
    s0    start state, X x W with strides s0_x, s0_w, one per (sequence, key head, segment); s1 where the walk ends
    z0    start of the keys' sum: X numbers for the output, W numbers (ZROW) for dq and dk; z1 where it ends
    dots  (TILES, B, HX, T) fp32: u_i . out_i without the diagonal, which no decay touches
    marks (HS places, X, W), z_marks (.., W): dq keeps the state at the end of every CK chunks; dk meets it with its
          gradient, ends (TILES, HS places) fp32 is their product
    prev, prev_den   what another sweep gave, to be added

A program has one sequence, head, segment of time and tile of BW columns. DIAG: 0 a token sees itself, 1 it does and the
diagonal is added apart from the matrix product (for dots), 2 it does not.
"""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.causal_parts import inside, mark

# Numbers that change from call to call: no kernel of its own for each that is 1 or a multiple of 16.
SIZES = ["T", "segment", "NSEG", "HX", "HS", "chunks", "places", "eps"]
STRIDES = ["dots_tile", "ends_tile", "mask_b", "plane"]


@triton.jit(do_not_specialize=SIZES + STRIDES)
def sweep(
    x, x_b, x_h, x_t, x_d, y, y_b, y_h, y_t, y_d, w, w_b, w_h, w_t, w_d, u, u_b, u_h, u_t, u_d,
    out, o, den, prev_den, prev, g, dots, dots_tile, marks, z_marks, ends, ends_tile, gates, plane, keeps,
    key_mask, mask_b, cu, s0, s0_x, s0_w, s1, z0, z1,
    T, segment, NSEG, HX, HS, chunks, places, eps,
    X: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr,
    DIV: tl.constexpr, LOOP: tl.constexpr, REVERSE: tl.constexpr, DIAG: tl.constexpr,
    DECAY: tl.constexpr, PACKED: tl.constexpr, MASK_Y: tl.constexpr, MASK_X: tl.constexpr,
    DEN: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr, EXTRA: tl.constexpr, NEW_G: tl.constexpr,
    ZCOL: tl.constexpr, ZROW: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, Z1: tl.constexpr, DOTS: tl.constexpr,
    MARK: tl.constexpr, CK: tl.constexpr, ADD: tl.constexpr,
    BF16: tl.constexpr, PREC: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # DEN: row sums are made. NORM: 0 none, 1 sum, 2 abs_max_one; of the output (DEN) or of the gradient.
    # SCALE: r of 1 rows, 2 columns. EXTRA: g of 1 rows, 2 columns. SPLIT: differences of f in two fp32 parts.
    # ZROW: 1 read with g of the row, where there is one (dq), 2 read with 1 (dk).
    # MARK: 1 keep the state, 2 meet the one kept. BF16: products in bf16, else in fp32.
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % TILES
    pid = pid // TILES
    h = pid % HX
    pid = pid // HX
    seg = pid % NSEG
    n = pid // NSEG
    hs = h // DIV
    if PACKED:
        b = n * 0
        first = tl.load(cu + n).to(tl.int64)
        last = tl.load(cu + n + 1).to(tl.int64)
        chunk0 = hs * chunks + first // L + n
        place0 = hs * places + first // (CK * L) + n
    else:
        b = n
        first = n * 0
        last = first + T
        chunk0 = (n * HS + hs) * chunks
        place0 = (n * HS + hs) * places
    start = first + seg * segment
    end = tl.minimum(start + segment, last)
    count = tl.cdiv(tl.maximum(end - start, 0), L).to(tl.int32)

    i = tl.arange(0, L)
    ex = tl.arange(0, BX)
    ew = (tile * BW).to(tl.int32) + tl.arange(0, BW)
    x_ok = ex < X
    w_ok = ew < W
    state = (n * HS + hs) * NSEG + seg
    S = tl.zeros([BX, BW], tl.float32)
    if S0:
        sp = s0 + state * X * W + ex[:, None] * s0_x + ew[None, :] * s0_w
        S += tl.load(sp, mask=x_ok[:, None] & w_ok[None, :], other=0.0)
    if ZCOL:
        # All columns are equal: sixteen of them are the narrowest matrix product.
        Z = tl.zeros([BX, 16], tl.float32)
        if S0:
            Z += tl.load(z0 + state * X + ex, mask=x_ok, other=0.0)[:, None]
        ones = tl.full([L, 16], 1.0, tl.float32).to(DT)
    if ZROW > 0:
        zr = tl.zeros([BW], tl.float32)
        if S0:
            zr += tl.load(z0 + state * W + ew, mask=w_ok, other=0.0)

    row = b * HX + h
    x += b * x_b + h * x_h + start * x_t
    xo = i[:, None] * x_t + ex[None, :] * x_d
    wo = i[:, None] * w_t + ew[None, :] * w_d
    yo = ex[:, None] * y_d + i[None, :] * y_t
    uo = i[:, None] * u_t + ew[None, :] * u_d if DOTS else 0
    oo = i[:, None] * W + ew[None, :]
    if REVERSE:
        seen = (i[:, None] <= i[None, :]) if DIAG == 0 else (i[:, None] < i[None, :])
    else:
        seen = (i[:, None] >= i[None, :]) if DIAG == 0 else (i[:, None] > i[None, :])

    # Told the stages here, the compiler fetches all loads ahead, not only those of matrix products.
    for step in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - step if REVERSE else step
        t0 = c.to(tl.int64) * L
        at = start + t0
        ok = at + i < end
        x_rows = ok
        y_rows = ok
        if MASK_X:
            x_rows = ok & (tl.load(key_mask + b * mask_b + at + i, mask=ok, other=0) != 0)
        if MASK_Y:
            y_rows = ok & (tl.load(key_mask + b * mask_b + at + i, mask=ok, other=0) != 0)
        if MARK > 0 and REVERSE:
            if (c % CK == CK - 1) | (c == count - 1):
                mark(
                    S, zr if ZROW > 0 else None, marks, z_marks, ends + tile * ends_tile,
                    place0 + (seg * segment) // (CK * L) + c // CK, ex, ew, h % DIV, X, W, MARK,
                )  # fmt: skip
        xv = tl.load(x + t0 * x_t + xo, mask=inside(x_rows, x_ok, X, BX), other=0.0).to(DT)

        if DECAY:
            gate = gates + (b * HS + hs) * T + at + i
            hi = tl.load(gate, mask=ok, other=0.0)
            read = tl.load(gate + (2 if REVERSE else 1) * plane, mask=ok, other=0.0)
            write = tl.load(gate + (1 if REVERSE else 2) * plane, mask=ok, other=0.0)
            keep = tl.load(keeps + chunk0 + (seg * segment) // L + c)
            if SPLIT:
                lo = tl.load(gate + 3 * plane, mask=ok, other=0.0)
        else:
            read = tl.full([L], 1.0, tl.float32)
            write = tl.full([L], 1.0, tl.float32)
        reading = read
        if SCALE == 1:
            d = tl.load(den + row * T + at + i, mask=ok, other=1.0)
            if NORM == 1:
                r = 1.0 / (d + eps)
                slope = r
            else:
                r = 1.0 / tl.maximum(tl.abs(d), 1.0)
                slope = tl.where(d >= 1.0, r, tl.where(d <= -1.0, -r, 0.0))
            reading = read * r
            if NEW_G:
                op = o + (row * T + at) * X + i[:, None] * X + ex[None, :]
                ov = tl.load(op, mask=inside(ok, x_ok, X, BX), other=0.0).to(tl.float32)
                gi = -tl.sum(xv.to(tl.float32) * ov, axis=1) * slope
                if tile == 0:
                    tl.store(g + row * T + at + i, gi, mask=ok)
            else:
                gi = tl.load(g + row * T + at + i, mask=ok, other=0.0)

        # What came before the chunk.
        acc = tl.dot(xv, S.to(DT), input_precision=PREC)
        if DECAY or SCALE == 1:
            acc = acc * reading[:, None]
        if ZROW == 1 and EXTRA == 1:
            acc += (read * gi)[:, None] * zr[None, :]
        if ZROW == 2:
            acc += read[:, None] * zr[None, :]
        if DEN:
            z_hi = Z.to(DT)
            z_lo = (Z - z_hi.to(tl.float32)).to(DT)
            column = tl.arange(0, 16)[None, :]
            zz = tl.where(column == 0, z_hi, tl.where(column == 1, z_lo, tl.zeros_like(z_hi)))
            sums = read * tl.sum(tl.dot(xv, zz, input_precision=PREC), axis=1)
        if DECAY:
            S = S * keep
            if ZCOL:
                Z = Z * keep
            if ZROW > 0:
                zr = zr * keep
        if DIAG == 1 and LOOP > 1:
            own = tl.zeros([L, BW], tl.float32)

        # Pairs inside the chunk, and what the chunk leaves behind.
        for group in range(LOOP):
            hy = hs * LOOP + group
            y_ok = y_rows[None, :] if X == BX else x_ok[:, None] & y_rows[None, :]
            yv = tl.load(y + b * y_b + hy * y_h + at * y_t + yo, mask=y_ok, other=0.0).to(DT)
            wv = tl.load(w + b * w_b + hy * w_h + at * w_t + wo, mask=inside(y_rows, w_ok, W, BW), other=0.0).to(DT)
            P = tl.dot(xv, yv, input_precision=PREC)
            writing = write
            if SCALE == 2:
                rows2 = (b * (HS * LOOP) + hy) * T + at + i
                d = tl.load(den + rows2, mask=ok, other=1.0)
                r = 1.0 / (d + eps) if NORM == 1 else 1.0 / tl.maximum(tl.abs(d), 1.0)
                P = P * r[None, :]
                writing = write * r
            if SCALE == 1:
                P = P * r[:, None]
            if EXTRA == 1:
                P += gi[:, None]
            if EXTRA == 2:
                gj = tl.load(g + (b * (HS * LOOP) + hy) * T + at + i, mask=ok, other=0.0)
                P += gj[None, :]
            if DIAG == 1:
                diagonal = tl.sum(tl.where(i[:, None] == i[None, :], P, 0.0), axis=1)
                if LOOP > 1:
                    own += diagonal[:, None] * wv.to(tl.float32)
            if DECAY:
                gap = hi[None, :] - hi[:, None] if REVERSE else hi[:, None] - hi[None, :]
                if SPLIT:
                    gap += lo[None, :] - lo[:, None] if REVERSE else lo[:, None] - lo[None, :]
                P = P * tl.exp(tl.where(seen, tl.minimum(gap, 0.0), float("-inf")))
            P = tl.where(seen, P, 0.0)
            if DEN:
                sums += tl.sum(P, axis=1)
            acc = tl.dot(P.to(DT), wv, acc, input_precision=PREC)
            if DOTS and LOOP == 1:
                # Apart from the case of several groups, or the diagonal would need a tile of its own in registers.
                uv = tl.load(u + b * u_b + h * u_h + at * u_t + uo, mask=inside(x_rows, w_ok, W, BW), other=0.0)
                tl.store(dots + tile * dots_tile + row * T + at + i, tl.sum(uv.to(tl.float32) * acc, axis=1), mask=ok)
                if DIAG == 1:
                    acc += diagonal[:, None] * wv.to(tl.float32)
            if DECAY or SCALE == 2:
                yv = (yv.to(tl.float32) * writing[None, :]).to(DT)
            S = tl.dot(yv, wv, S, input_precision=PREC)
            if ZCOL:
                Z = tl.dot(yv, ones, Z, input_precision=PREC)
            if ZROW == 1:
                zr += tl.sum(wv.to(tl.float32) * write[:, None], axis=0)
            if ZROW == 2 and EXTRA == 2:
                zr += tl.sum(wv.to(tl.float32) * (write * gj)[:, None], axis=0)

        if MARK > 0 and not REVERSE:
            if (c % CK == CK - 1) | (c == count - 1):
                mark(
                    S, zr if ZROW > 0 else None, marks, z_marks, ends + tile * ends_tile,
                    place0 + (seg * segment) // (CK * L) + c // CK, ex, ew, h % DIV, X, W, MARK,
                )  # fmt: skip
        if DOTS and LOOP > 1:
            uv = tl.load(u + b * u_b + h * u_h + at * u_t + uo, mask=inside(x_rows, w_ok, W, BW), other=0.0)
            tl.store(dots + tile * dots_tile + row * T + at + i, tl.sum(uv.to(tl.float32) * acc, axis=1), mask=ok)
            if DIAG == 1:
                acc += own
        place = (row * T + at) * W + oo
        w_rows = inside(ok, w_ok, W, BW)
        if ADD:
            acc += tl.load(prev + place, mask=w_rows, other=0.0).to(tl.float32)
        if DEN:
            if ADD:
                sums += tl.load(prev_den + row * T + at + i, mask=ok, other=0.0)
            if tile == 0:
                tl.store(den + row * T + at + i, sums, mask=ok)
            if NORM == 1:
                acc = acc / (sums + eps)[:, None]
            if NORM == 2:
                acc = acc / tl.maximum(tl.abs(sums), 1.0)[:, None]
        if MASK_X:
            acc = tl.where(x_rows[:, None], acc, 0.0)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=w_rows)

    # Query heads that share a key head end in the same state: the first of them writes it.
    if S1:
        if h % DIV == 0:
            sp = s1 + state * X * W + ex[:, None] * W + ew[None, :]
            tl.store(sp, S, mask=x_ok[:, None] & w_ok[None, :])
    if Z1:
        if h % DIV == 0:
            if ZCOL:
                if tile == 0:
                    tl.store(z1 + state * X + ex, tl.sum(Z, axis=1) * 0.0625, mask=x_ok)
            if ZROW > 0:
                tl.store(z1 + state * W + ew, zr, mask=w_ok)
