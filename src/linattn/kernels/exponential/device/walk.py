# mypy: ignore-errors
# ruff: noqa: SIM102  (a condition known to the compiler stands alone)
"""One walk of exponential attention along a sequence, with the state in registers: the output or one gradient.

Inside a chunk all sums are in the unit of the chunk's end (see exponential_units), so a pair's weight is a factor of
its key, c_j, and a row's own factor is left in the denominator, where it is the floor's:

    N_i = q_i S + sum_{j<=i} (q_i . k_j) c_j v_j      D_i likewise with 1 for v      o_i = N_i / max(|D_i|, floor_i)

with S = keep (the state before the chunk). Every walk has that form:

    out_i = factor_i (x_i S + e z + sum_j (x_i . y_j + e) column_j w_j)      S += sum_j column_j y_j w_j^T

    what         x    y    w    column   factor          e                 z                     walks
    0 output     q    k    v    c_j      1 / n_i         -                 (sums of keys, for D)  along
    1 dq         do   v    k    c_j      r_i             e_i               sum_j c_j k_j          along
    2 dk         v    do   q    r_j      c_i             e_j (none on z)   sum_j r_j e_j q_j      against
    3 dv         k    q    do   r_j      c_i             -                 -                      against

with r = 1 / n and r e the gradient of D. What is rounded for a product is w with its factor, the scores and the state;
q and k go into products as they are: rounded with a factor they would spoil a denominator that is a small difference.

    x, y, w (B, heads, T, X or W)   out (B, H, T, W)   den (B, H, T) fp32: D, made by walk 0
    gates (B, HS, T, 2), keep (B, HS, T), spans: of exponential_units   rows (B, H, T, 2) fp32: r and e
    u     (B, heads, T, W) with dots (TILES, B, H, T): u_i . out_i of each tile of columns (walk 2, u = k; 1, u = q)
    marks (rows places, X, W), z_marks (.., W) fp32: state and z at the end of every CK tiles; walk 1 keeps them
    flows (TILES, rows places) fp32: their product with the gradient of the state, which walk 2 makes
    s0    start state, X x W with strides s0_x, s0_w, of (sequence, head, segment); s1 where the walk ends, of
          (sequence, head). z0, z1 likewise. Heads are those of keys along time, and against it those of queries

A program has one sequence, query head, segment of time and tile of BW columns. Of query heads that share a key head
each writes its own gradients; along time the first of them writes states. Two kernels, of which one leaves at once:
STEEP walks where some tile falls into several chunks; the other knows that a chunk is a tile.
"""

import triton
import triton.language as tl

from linattn.kernels.causal.device.parts import first_row, shortest
from linattn.kernels.exponential.device.chunk import chunk


@triton.jit(do_not_specialize=["T", "segment", "NSEG", "H", "HS", "places", "mark_places", "dots_tile", "flows_tile"])
def walk(
    x, x_b, x_h, x_t, x_d, y, y_b, y_h, y_t, y_d, w, w_b, w_h, w_t, w_d, u, u_b, u_h, u_t, u_d,
    out, den, gates, keep, spans, rows, dots, dots_tile, marks, z_marks, flows, flows_tile, cu,
    s0, s0_x, s0_w, s1, z0, z1, T, segment, NSEG, H, HS, places, mark_places,
    X: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr,
    GROUP: tl.constexpr, ROLE: tl.constexpr, STEEP: tl.constexpr, PACKED: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, MARK: tl.constexpr, CK: tl.constexpr, DOTS: tl.constexpr,
    BF16: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    X_T: tl.constexpr, Y_T: tl.constexpr, W_T: tl.constexpr, U_T: tl.constexpr,
    LEAN: tl.constexpr, PARTS: tl.constexpr, MADE: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    # X_T, ..: strides of tokens that the compiler may know, 0 where not. LEAN, PARTS: see exponential_config.
    # MADE: rows is 1 / n (B, H, T) of the output, whose row sums another kernel made.
    # SIDE_BY_SIDE: heads of a token that lie together in out, see first_row.
    if X_T > 0:
        x_t = X_T
    if Y_T > 0:
        y_t = Y_T
    if W_T > 0:
        w_t = W_T
    if U_T > 0:
        u_t = U_T
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    REVERSE: tl.constexpr = ROLE >= 2
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % TILES
    pid = pid // TILES
    h = pid % H
    pid = pid // H
    seg = pid % NSEG
    n = pid // NSEG
    hs = h // GROUP
    if PACKED:
        b = n * 0
        first = tl.load(cu + n).to(tl.int64)
        last = tl.load(cu + n + 1).to(tl.int64)
        spans += hs * places + first // L + n
        place0 = first // (CK * L) + n
    else:
        b = n
        first = n * 0
        last = first + T
        spans += (n * HS + hs) * places
        place0 = first
    start = first + seg * segment
    end = tl.minimum(start + segment, last)
    spans += (seg * segment) // L
    place0 += (seg * segment) // (CK * L)
    # Of a stretch: one place a key head for its state, one a query head for the state's product with its gradient.
    mark0 = (b * HS + hs) * mark_places + place0
    flow0 = tile * flows_tile + (b * H + h) * mark_places + place0
    count = tl.cdiv(tl.maximum(end - start, 0), L).to(tl.int32)
    if (shortest(spans, count, L) < L) != STEEP:
        return

    ex = tl.arange(0, BX)
    ew = (tile * BW).to(tl.int32) + tl.arange(0, BW)
    x_ok = ex < X
    w_ok = ew < W
    S = tl.zeros([BX, BW], tl.float32)
    # Of keys, X numbers for D and W for gradients. In registers: a column of a product would be too narrow for one.
    zc = tl.zeros([BX, PARTS], tl.float32) if PARTS > 0 and ROLE == 0 else tl.zeros([BX], tl.float32)
    zr = tl.zeros([PARTS, BW], tl.float32) if PARTS > 0 and ROLE > 0 else tl.zeros([BW], tl.float32)
    owner = n * H + h if REVERSE else n * HS + hs
    if S0:
        state = owner * NSEG + seg
        sp = s0 + state * X * W + ex[:, None] * s0_x + ew[None, :] * s0_w
        S += tl.load(sp, mask=x_ok[:, None] & w_ok[None, :], other=0.0)
        if ROLE == 0 and not MADE:
            begun = tl.load(z0 + state * X + ex, mask=x_ok, other=0.0)
            if PARTS > 0:
                zc += tl.where(tl.arange(0, PARTS)[None, :] == 0, begun[:, None], 0.0)
            else:
                zc += begun
        elif ROLE == 1 or ROLE == 2:
            begun = tl.load(z0 + state * W + ew, mask=w_ok, other=0.0)
            if PARTS > 0:
                zr += tl.where(tl.arange(0, PARTS)[:, None] == 0, begun[None, :], 0.0)
            else:
                zr += begun

    i = tl.arange(0, L)
    row = (b * H + h) * T + start
    gate = (b * HS + hs) * T + start
    gates += 2 * gate
    keep += gate
    hx = hs if REVERSE else h
    hy = h if REVERSE else hs
    x += b * x_b + hx * x_h + start * x_t
    y += b * y_b + hy * y_h + start * y_t
    w += b * w_b + hy * w_h + start * w_t + tile * BW * w_d
    u += b * u_b + hx * u_h + start * u_t + tile * BW * u_d
    out += first_row(b, h, H, start, T, W, SIDE_BY_SIDE) + tile * BW
    den += row
    rows += row if MADE else 2 * row
    dots += tile * dots_tile + row
    column_of = tl.arange(0, BW)
    xo = i[:, None] * x_t + ex[None, :] * x_d
    yo = ex[:, None] * y_d + i[None, :] * y_t
    wo = i[:, None] * w_t + column_of[None, :] * w_d
    uo = i[:, None] * u_t + column_of[None, :] * u_d
    if not REVERSE:
        if S0:
            kept = tl.load(keep, mask=start < end, other=1.0)
            S = S * kept
            zc = zc * kept
            zr = zr * kept

    end -= start  # tokens are counted from the start from here on
    # Its copy for products is made at the end of a chunk, see there.
    S_dt = S.to(DT)
    # Told the stages here, the compiler fetches all loads ahead, not only those of matrix products.
    for step in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - step if REVERSE else step
        at = c.to(tl.int64) * L
        if MARK and REVERSE:
            if (c % CK == CK - 1) | (c == count - 1):
                there = x_ok[:, None] & w_ok[None, :]
                mark = marks + (mark0 + c // CK) * X * W + ex[:, None] * W + ew[None, :]
                flow = tl.sum(tl.sum(tl.load(mark, mask=there, other=0.0) * S, axis=1), axis=0)
                sums = tl.sum(zr, axis=0) if PARTS > 0 else zr
                flow += tl.sum(tl.load(z_marks + (mark0 + c // CK) * W + ew, mask=w_ok, other=0.0) * sums, axis=0)
                tl.store(flows + flow0 + c // CK, flow)
        if STEEP:
            span = tl.load(spans + c)
            for part in range(0, L // span):
                lo = (L // span - 1 - part if REVERSE else part) * span
                S, S_dt, zc, zr = chunk(
                    at, lo, lo + span, S, S_dt, zc, zr, x, x_t, y, y_t, w, w_t, u, u_t, xo, yo, wo, uo,
                    out, den, gates, keep, rows, dots, marks, z_marks, mark0, c, count, tile, end, h,
                    X, W, BX, BW, L, GROUP, ROLE, True, EVEN, MARK, CK, DOTS, DT, PREC,
                    LEAN and BF16, PARTS, MADE, SIDE_BY_SIDE,
                )  # fmt: skip
        else:
            S, S_dt, zc, zr = chunk(
                at, 0, L, S, S_dt, zc, zr, x, x_t, y, y_t, w, w_t, u, u_t, xo, yo, wo, uo,
                out, den, gates, keep, rows, dots, marks, z_marks, mark0, c, count, tile, end, h,
                X, W, BX, BW, L, GROUP, ROLE, False, EVEN, MARK, CK, DOTS, DT, PREC,
                LEAN and BF16, PARTS, MADE, SIDE_BY_SIDE,
            )  # fmt: skip

    if S1:
        if REVERSE or h % GROUP == 0:
            tl.store(s1 + owner * X * W + ex[:, None] * W + ew[None, :], S, mask=x_ok[:, None] & w_ok[None, :])
            if ROLE == 0 and not MADE:
                if tile == 0:
                    tl.store(z1 + owner * X + ex, tl.sum(zc, axis=1) if PARTS > 0 else zc, mask=x_ok)
            if ROLE == 2:
                tl.store(z1 + owner * W + ew, tl.sum(zr, axis=0) if PARTS > 0 else zr, mask=w_ok)
