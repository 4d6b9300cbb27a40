# mypy: ignore-errors
"""What each segment of a sequence adds to the state of exponential attention, and what it keeps of the one before.

    along (REVERSE = 0)    S = keep S + sum_j c_j k_j v_j^T            z = keep z + sum_j c_j k_j
    against                S = keep (S + sum_j r_j q_j do_j^T)         z = keep (z + sum_j r_j e_j q_j)

chunk by chunk. y, w (B, heads, T, K or V); pairs (B, HS, T, 2), of which the first is c,
or (B, H, T, 2), r and e; other names: walk.

    s (N, heads, NSEG, K, V)   z (.., NSEG, K)   kepts (.., NSEG)   fp32; heads: of keys, against time of queries

A program has one sequence, head, segment and tile of BW columns.
"""

import triton
import triton.language as tl

from linattn.kernels.causal.device.parts import add_product, inside


@triton.jit(do_not_specialize=["T", "segment", "NSEG", "heads", "places"])
def states(
    y, y_b, y_h, y_t, y_d, w, w_b, w_h, w_t, w_d, pairs, keep, spans, cu, s, z, kepts,
    T, segment, NSEG, heads, places,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr,
    GROUP: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, BF16: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # GROUP: query heads of a key head, along time 1.
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % TILES
    pid = pid // TILES
    h = pid % heads
    pid = pid // heads
    seg = pid % NSEG
    n = pid // NSEG
    hs = h // GROUP
    HS = heads // GROUP
    if PACKED:
        b = n * 0
        first = tl.load(cu + n).to(tl.int64)
        last = tl.load(cu + n + 1).to(tl.int64)
        spans += hs * places + first // L + n
    else:
        b = n
        first = n * 0
        last = first + T
        spans += (n * HS + hs) * places
    start = first + seg * segment
    end = tl.minimum(start + segment, last)
    spans += (seg * segment) // L
    count = tl.cdiv(tl.maximum(end - start, 0), L).to(tl.int32)

    i = tl.arange(0, L)
    ek = tl.arange(0, BK)
    ew = (tile * BW).to(tl.int32) + tl.arange(0, BW)
    k_ok = ek < K
    w_ok = ew < V
    y += b * y_b + h * y_h
    w += b * w_b + h * w_h
    pairs += (b * heads + h) * T * 2
    keep += (b * HS + hs) * T
    yo = ek[:, None] * y_d + i[None, :] * y_t
    wo = i[:, None] * w_t + ew[None, :] * w_d
    S = tl.zeros([BK, BW], tl.float32)
    zs = tl.zeros([BK], tl.float32)
    kept = tl.full([], 1.0, tl.float32)
    for step in range(0, count):
        c = count - 1 - step if REVERSE else step
        at = start + c.to(tl.int64) * L
        span = tl.load(spans + c)
        for part in range(0, L // span):
            lo = (L // span - 1 - part if REVERSE else part) * span
            ok = (at + i < end) & (i >= lo) & (i < lo + span)
            y_ok = ok[None, :] if K == BK else k_ok[:, None] & ok[None, :]
            yv = tl.load(y + at * y_t + yo, mask=y_ok, other=0.0).to(DT)
            wv = tl.load(w + at * w_t + wo, mask=inside(ok, w_ok, V, BW), other=0.0).to(tl.float32)
            own = tl.load(pairs + 2 * (at + i), mask=ok, other=0.0)
            of_sum = own
            if REVERSE:
                of_sum = own * tl.load(pairs + 2 * (at + i) + 1, mask=ok, other=0.0)
            keeps = tl.load(keep + at + lo, mask=at + lo < end, other=1.0)
            kept *= keeps
            if not REVERSE:
                S = S * keeps
                zs = zs * keeps
            zs += tl.sum(yv.to(tl.float32) * of_sum[None, :], axis=1)
            S = add_product(yv, (wv * own[:, None]).to(DT), S, PREC)
            if REVERSE:
                S = S * keeps
                zs = zs * keeps
    state = (n * heads + h) * NSEG + seg
    tl.store(s + state * K * V + ek[:, None] * V + ew[None, :], S, mask=k_ok[:, None] & w_ok[None, :])
    if tile == 0:
        tl.store(z + state * K + ek, zs, mask=k_ok)
        tl.store(kepts + state, kept)
