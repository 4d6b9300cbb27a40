# mypy: ignore-errors
# ruff: noqa: SIM102  (a condition known to the compiler stands alone)
"""One walk along a sequence, chunk by chunk, with the state in registers. It serves forward and backward alike.

    out_i = sum_j M_ij g r (x_i . y_j + e) w_j        j at or before i; with REVERSE at or after i

    what        x    y    w    r        e       walks                  u, for the decay's gradient
    output      q    k    v    1        0       along                  -
    dq          do   v    k    1/n_i    e_i     along                  q
    dk          v    do   q    1/n_j    e_j     against (REVERSE)      k
    dv          k    q    do   1/n_j    0       against (REVERSE)      -

with the normaliser n, r e = d loss / d row sum, and g the weight of the pair's key, where keys have some. In a sweep
against time (LION's second one) all four turn round.

    x (B, HX, T, X)   y (B, HX / DIV LOOP, T, X)   w (like y, .., W)   out (B, HX, T, W)   u like out
    den   (B, HX, T) fp32, row sums that the output's sweep makes    scale, e  (B, heads of q, T) fp32, r and e
    gates (.., B, HS, T), keeps (.., chunks)   what the decay does inside a chunk, see potentials
    s0    start state, X x W with strides s0_x, s0_w, one per (sequence, key head, segment); s1 where the walk ends
    z0    start of the keys' sum: X numbers for the output, W numbers (ZROW) for dq and dk; z1 where it ends
    dots  (DOTS, TILES, B, HX, T) fp32: u_i . out_i without the diagonal, which no decay touches (with it, in dq and dk
          alike, where only their difference is wanted); then what the diagonal gave it; then u_i . w_i
    marks (HS places, X, W), z_marks (.., W): the state (dq), or its gradient (dk), at the end of every CK chunks
    prev, prev_den   what another sweep gave, to be added; prev lies in memory as out does

X may be a part of the features of x, whose state is X rows of one of size numbers; the sweeps of all parts add up.

A program has one sequence, head, segment of time and tile of BW columns. DIAG: 0 a token sees itself, 1 it does and the
diagonal is added apart from the matrix product (for dots), 2 it does not. SIDE_BY_SIDE: heads of a token that
lie together in out, see first_row.
"""

import triton
import triton.language as tl

from linattn.kernels.causal.device.chunk import chunk
from linattn.kernels.causal.device.parts import first_row, weakest

# Numbers that change from call to call: no kernel of its own for each that is 1 or a multiple of 16.
SIZES = ["T", "segment", "NSEG", "HX", "HS", "chunks", "places", "size", "eps"]
STRIDES = ["dots_tile", "dots_plane", "mask_b", "plane"]


@triton.jit(do_not_specialize=SIZES + STRIDES)
def sweep(
    x, x_b, x_h, x_t, x_d, y, y_b, y_h, y_t, y_d, w, w_b, w_h, w_t, w_d, u, u_b, u_h, u_t, u_d,
    out, den, prev_den, prev, scale, e, dots, dots_tile, dots_plane, marks, z_marks, gates, plane, keeps,
    key_mask, mask_b, cu, s0, s0_x, s0_w, s1, z0, z1,
    T, segment, NSEG, HX, HS, chunks, places, size, eps,
    X: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr,
    DIV: tl.constexpr, LOOP: tl.constexpr, REVERSE: tl.constexpr, DIAG: tl.constexpr,
    DECAY: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, MASK_Y: tl.constexpr, MASK_X: tl.constexpr,
    DEN: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr, EXTRA: tl.constexpr,
    ZCOL: tl.constexpr, ZROW: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, Z1: tl.constexpr, DOTS: tl.constexpr,
    MARK: tl.constexpr, CK: tl.constexpr, ADD: tl.constexpr,
    BF16: tl.constexpr, PREC: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, LEAN: tl.constexpr,
    PARTS: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, WEIGHT_Y: tl.constexpr = 0, WEIGHT_X: tl.constexpr = 0,
):  # fmt: skip
    # DEN: row sums are made, and NORM divides by them: 0 not, 1 sum, 2 abs_max_one.
    # SCALE: r of 1 rows, 2 columns, 3 rows of the output, whose row sums another kernel made.
    # EXTRA: e of 1 rows, 2 columns. SPLIT: differences of f in two fp32 parts.
    # MILD: 1 walks whose decay is mild enough for factors and no others, 2 those others, 0 all, without factors.
    # WEIGHT_Y, WEIGHT_X: the plane of gates with the weights of keys, where these are columns, where they are rows.
    # MARK: states are kept. BF16: products in bf16, else in fp32.
    # ZROW: 1 read with e of the row, where there is one (dq), 2 read with 1 (dk).
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
    chunk0 += (seg * segment) // L
    place0 += (seg * segment) // (CK * L)
    start = first + seg * segment
    end = tl.minimum(start + segment, last)
    count = tl.cdiv(tl.maximum(end - start, 0), L).to(tl.int32)

    if MILD > 0:
        # exp(-60): what is lost in one factor is in the other, both far inside the range of bf16. Two kernels, of which
        # one leaves at once: in one, each form would keep registers that the other needs.
        mild = weakest(keeps + chunk0, count) >= 8.7565e-27
        if mild != (MILD == 1):
            return

    i = tl.arange(0, L)
    ex = tl.arange(0, BX)
    ew = (tile * BW).to(tl.int32) + tl.arange(0, BW)
    x_ok = ex < X
    w_ok = ew < W
    state = (n * HS + hs) * NSEG + seg
    S = tl.zeros([BX, BW], tl.float32)
    if S0:
        sp = s0 + state * size + ex[:, None] * s0_x + ew[None, :] * s0_w
        S += tl.load(sp, mask=x_ok[:, None] & w_ok[None, :], other=0.0)
    # Sums of keys stay in registers: as a column of a matrix product they would be too narrow, see docs/kernels.md.
    # In PARTS, which add up to them, they are as wide as other operands: see spread.
    zc = tl.zeros([BX, PARTS], tl.float32) if PARTS > 0 else tl.zeros([BX], tl.float32)
    zr = tl.zeros([BW], tl.float32)
    if ZCOL:
        if S0:
            begun = tl.load(z0 + state * X + ex, mask=x_ok, other=0.0)
            if PARTS > 0:
                zc += tl.where(tl.arange(0, PARTS)[None, :] == 0, begun[:, None], 0.0)
            else:
                zc += begun
    if ZROW > 0:
        if S0:
            zr += tl.load(z0 + state * W + ew, mask=w_ok, other=0.0)

    row = b * HX + h
    x += b * x_b + h * x_h + start * x_t
    # Counted from the start of the segment, a chunk's place takes the fewest registers; but where they are shortest, in
    # gradients of a decay beside a normaliser, that of the sequence, which other places need anyway.
    FROM_START: tl.constexpr = DOTS == 0 or SCALE == 0
    if SIDE_BY_SIDE > 1:
        place = first_row(b, h, HX, start if FROM_START else start * 0, T, W, SIDE_BY_SIDE)
        out += place
        if ADD:
            prev += place
    xo = i[:, None] * x_t + ex[None, :] * x_d
    wo = i[:, None] * w_t + ew[None, :] * w_d
    yo = ex[:, None] * y_d + i[None, :] * y_t
    if DECAY:
        gates += (b * HS + hs) * T
    if MASK_X or MASK_Y:
        key_mask += b * mask_b
    if DOTS > 0:
        dots += tile * dots_tile

    # Its copy for products is made at the end of a chunk, see there.
    S_dt = S.to(DT)
    # Told the stages here, the compiler fetches all loads ahead, not only those of matrix products.
    for step in tl.range(0, count, num_stages=STAGES):
        S, S_dt, zc, zr = chunk(
            step, count, S, S_dt, zc, zr,
            x, x_t, y, y_b, y_h, y_t, y_d, w, w_b, w_h, w_t, w_d, u, u_b, u_h, u_t, u_d, xo, yo, wo,
            out, den, prev_den, prev, scale, e, dots, dots_plane, marks, z_marks, gates, plane, keeps, key_mask,
            b, h, hs, row, tile, start, end, T, HS, chunk0, place0, size, eps,
            X, W, BX, BW, L, DIV, LOOP, REVERSE, DIAG, DECAY, MILD == 1, MASK_Y, MASK_X, DEN, NORM, SCALE, EXTRA,
            ZCOL, ZROW, DOTS, MARK, CK, ADD, DT, PREC, SPLIT, LEAN and BF16, PARTS, WEIGHT_Y, WEIGHT_X,
            SIDE_BY_SIDE, FROM_START,
        )  # fmt: skip

    # Query heads that share a key head end in the same state: the first of them writes it.
    if S1:
        if h % DIV == 0:
            sp = s1 + state * size + ex[:, None] * W + ew[None, :]
            tl.store(sp, S, mask=x_ok[:, None] & w_ok[None, :])
    if Z1:
        if h % DIV == 0:
            if ZCOL:
                if tile == 0:
                    tl.store(z1 + state * X + ex, tl.sum(zc, axis=1) if PARTS > 0 else zc, mask=x_ok)
            if ZROW > 0:
                tl.store(z1 + state * W + ew, zr, mask=w_ok)
