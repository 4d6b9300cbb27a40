# mypy: ignore-errors
"""What each segment of a sequence adds to the state, starting from nothing: the first of three passes over segments.

    s = sum_j weight_j r_j y_j w_j^T      z = sum_j weight_j r_j e_j y_j

    y (B, HS LOOP, T, Y)   w (B, HS LOOP, T, W)   scale, e (B, HS LOOP, T) fp32   gates, keeps: see potentials
    s (sequences, HS, NSEG, Y, W) fp32   z (.., NSEG, Y) fp32   kepts (.., NSEG) fp32, what a segment leaves of a state

Along time y, w are k, v, r = e = 1. Against it (REVERSE) they are q and the output's gradient, r = 1/n (scale) and
r e = d loss / d row sum, and s is the gradient of the state. A program has one sequence, key head, segment and tile of
BW columns. Z: 0 none, 1 e = 1, 2 as given. WEIGHT: the plane of gates that holds weights of keys, 0 if there are none.
LAST: whether the last segment's share is needed too.

one is 1.0, but the compiler must not know that. A product of an operand that passes through registers has to end before
the next chunk arrives, and it does if its result is used for more than the next product.
"""

import triton
import triton.language as tl

from linattn.kernels.causal.device.parts import add_product


@triton.jit(do_not_specialize=["T", "segment", "NSEG", "HS", "chunks", "one", "mask_b", "plane"])
def states(
    y, y_b, y_h, y_t, y_d, w, w_b, w_h, w_t, w_d, scale, e, gates, plane, keeps, key_mask, mask_b, cu, s, z, kepts,
    T, segment, NSEG, HS, chunks, one,
    Y: tl.constexpr, W: tl.constexpr, BY: tl.constexpr, BW: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr,
    LOOP: tl.constexpr, REVERSE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr,
    SCALE: tl.constexpr, Z: tl.constexpr, LAST: tl.constexpr, BF16: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr, WEIGHT: tl.constexpr = 0,
):  # fmt: skip
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % TILES
    pid = pid // TILES
    hs = pid % HS
    pid = pid // HS
    seg = pid % NSEG
    n = pid // NSEG
    if PACKED:
        b = n * 0
        first = tl.load(cu + n).to(tl.int64)
        last = tl.load(cu + n + 1).to(tl.int64)
        chunk0 = hs * chunks + first // L + n
    else:
        b = n
        first = n * 0
        last = first + T
        chunk0 = (n * HS + hs) * chunks
    start = first + seg * segment
    end = tl.minimum(start + segment, last)
    count = tl.cdiv(tl.maximum(end - start, 0), L).to(tl.int32)
    if not LAST:
        # No segment comes after the one that is walked last: nobody asks what it adds.
        count = tl.where(seg == (0 if REVERSE else NSEG - 1), 0, count)

    i = tl.arange(0, L)
    ey = tl.arange(0, BY)
    ew = (tile * BW).to(tl.int32) + tl.arange(0, BW)
    y_ok = ey < Y
    w_ok = ew < W
    yo = ey[:, None] * y_d + i[None, :] * y_t
    wo = i[:, None] * w_t + ew[None, :] * w_d
    S = tl.zeros([BY, BW], tl.float32)
    zs = tl.zeros([BY], tl.float32)
    kept = tl.full([], 1.0, tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - step if REVERSE else step
        at = start + c.to(tl.int64) * L
        ok = at + i < end
        rows = ok
        if MASK:
            rows = ok & (tl.load(key_mask + b * mask_b + at + i, mask=ok, other=0) != 0)
        write = tl.full([L], 1.0, tl.float32)
        if DECAY:
            gate = gates + (b * HS + hs) * T + at + i
            write = tl.load(gate + (1 if REVERSE else 2) * plane, mask=ok, other=0.0)
            if WEIGHT > 0:
                write = write * tl.load(gate + WEIGHT * plane, mask=ok, other=0.0)
            keep = tl.load(keeps + chunk0 + (seg * segment) // L + c)
            kept *= keep
            S = S * keep
            zs = zs * keep
        elif SCALE or Z > 0:
            S = S * one
        for group in tl.range(0, LOOP, num_stages=1):
            hy = hs * LOOP + group
            y_rows = rows[None, :] if Y == BY else y_ok[:, None] & rows[None, :]
            w_rows = rows[:, None] if W % BW == 0 else rows[:, None] & w_ok[None, :]
            yv = tl.load(y + b * y_b + hy * y_h + at * y_t + yo, mask=y_rows, other=0.0).to(DT)
            wv = tl.load(w + b * w_b + hy * w_h + at * w_t + wo, mask=w_rows, other=0.0).to(DT)
            writing = write
            place = (b * (HS * LOOP) + hy) * T + at + i
            if SCALE:
                writing = write * tl.load(scale + place, mask=ok, other=0.0)
            if Z == 1:
                # Never the sum of a tile as it was loaded: in fp32 Triton 3.6 takes it out of the loop and fails.
                zs += tl.sum(yv.to(tl.float32) * (write * one)[None, :], axis=1)
            if Z == 2:
                ej = tl.load(e + place, mask=ok, other=0.0)
                zs += tl.sum(yv.to(tl.float32) * (writing * ej)[None, :], axis=1)
            if DECAY or SCALE:
                wv = (wv.to(tl.float32) * writing[:, None]).to(DT)
            S = add_product(yv, wv, S, PREC)
    state = (n * HS + hs) * NSEG + seg
    tl.store(s + state * Y * W + ey[:, None] * W + ew[None, :], S, mask=y_ok[:, None] & w_ok[None, :])
    if tile == 0:
        if Z > 0:
            tl.store(z + state * Y + ey, zs, mask=y_ok)
        if DECAY:
            tl.store(kepts + state, kept)
