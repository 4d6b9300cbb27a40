# mypy: ignore-errors
"""The linear sums of hybrid attention at every chunk of queries, and their gradients.

gains      what joins the sums between chunk e and e + 1: the tokens of chunk e - BACK that are not exact then
           D_e = sum psi_i v_i^T,  d_e = sum psi_i
gradients  of the sums that chunk c reads:  sum share_t phi_t (gate_t do_t)^T,  -sum share_t delta_t phi_t
running    from what each chunk adds to what stands before it (REVERSE: after it), in place

states (B, HS, chunks, F, V), sums (B, HS, chunks, F), share, delta (B, H, T): fp32;  ends: see parts
"""

import triton
import triton.language as tl

from linattn.kernels.hybrid.device.parts import rows_of


@triton.jit(do_not_specialize=["T", "HS", "chunks"])
def gains(
    psi, psi_b, psi_h, psi_t, v, v_b, v_h, v_t, ends, states, sums, T, HS, chunks,
    V: tl.constexpr, F: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    BACK: tl.constexpr, CHOSEN: tl.constexpr, BF16: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    TILES: tl.constexpr = (F + BF - 1) // BF
    pid = tl.program_id(0).to(tl.int64)
    part = pid % TILES
    place = pid // TILES
    e = (place % chunks).to(tl.int32)
    head = place // chunks
    b = head // HS
    hs = head % HS
    i = tl.arange(0, L)
    ev = tl.arange(0, BV)
    ef = (part * BF).to(tl.int32) + tl.arange(0, BF)
    S = tl.zeros([BF, BV], tl.float32)
    z = tl.zeros([L, BF], tl.float32)
    psi += b * psi_b + hs * psi_h
    v += b * v_b + hs * v_h
    for r in tl.range(0, tl.where(e >= BACK, R, 0), num_stages=1):
        at = (place * 0 + (e - BACK) * R + r) * L
        xs = rows_of(psi, at, psi_t, i, ef, F, BF)
        vs = rows_of(v, at, v_t, i, ev, V, BV)
        ones = xs.to(tl.float32)
        if CHOSEN:
            there = tl.load(ends + head * T + at + i) <= e + 1
            vs = tl.where(there[:, None], vs, 0.0)
            ones = tl.where(there[:, None], ones, 0.0)
        S = tl.dot(tl.trans(xs.to(DT)), vs.to(DT), S, input_precision=PREC)
        z += ones
    tl.store(states + place * F * V + ef[:, None] * V + ev[None, :], S, mask=(ef < F)[:, None] & (ev < V)[None, :])
    tl.store(sums + place * F + ef, tl.sum(z, axis=0), mask=ef < F)


@triton.jit(do_not_specialize=["T", "H", "HS", "chunks"])
def gradients(
    phi, phi_b, phi_h, phi_t, d_out, d_b, d_h, d_t, gate, gate_b, gate_h, gate_t, share, delta, states, sums,
    T, H, HS, chunks,
    V: tl.constexpr, F: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    GROUP: tl.constexpr, GATE: tl.constexpr, BF16: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    TILES: tl.constexpr = (F + BF - 1) // BF
    pid = tl.program_id(0).to(tl.int64)
    part = pid % TILES
    place = pid // TILES
    c = place % chunks
    head = place // chunks
    b = head // HS
    hs = head % HS
    i = tl.arange(0, L)
    ev = tl.arange(0, BV)
    ef = (part * BF).to(tl.int32) + tl.arange(0, BF)
    S = tl.zeros([BF, BV], tl.float32)
    z = tl.zeros([L, BF], tl.float32)
    for j in tl.range(0, GROUP * R, num_stages=1):
        h = hs * GROUP + j // R
        at = (c * R + j % R) * L
        xs = rows_of(phi + b * phi_b + h * phi_h, at, phi_t, i, ef, F, BF)
        gs = rows_of(d_out + b * d_b + h * d_h, at, d_t, i, ev, V, BV).to(tl.float32)
        if GATE:
            gs = gs * rows_of(gate + b * gate_b + h * gate_h, at, gate_t, i, ev, V, BV).to(tl.float32)
        row = (b * H + h) * T + at
        r = tl.load(share + row + i)
        gs = gs * r[:, None]
        S = tl.dot(tl.trans(xs.to(DT)), gs.to(DT), S, input_precision=PREC)
        z -= xs.to(tl.float32) * (r * tl.load(delta + row + i))[:, None]
    tl.store(states + place * F * V + ef[:, None] * V + ev[None, :], S, mask=(ef < F)[:, None] & (ev < V)[None, :])
    tl.store(sums + place * F + ef, tl.sum(z, axis=0), mask=ef < F)


@triton.jit(do_not_specialize=["chunks", "SIZE", "BLOCKS"])
def running(
    s, s0, s1, chunks, SIZE, BLOCKS,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, REVERSE: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
):  # fmt: skip
    # A program has BLOCK numbers of one row; AHEAD chunks are fetched at once.
    pid = tl.program_id(0).to(tl.int64)
    row = pid // BLOCKS
    e = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    ok = e < SIZE
    state = tl.zeros([BLOCK], tl.float32)
    if S0:
        state += tl.load(s0 + row * SIZE + e, mask=ok, other=0.0)
    a = tl.arange(0, AHEAD)
    for step in range(0, chunks, AHEAD):
        n = chunks - 1 - step - a if REVERSE else step + a
        inside = ((n >= 0) & (n < chunks))[:, None] & ok[None, :]
        p = s + (row * chunks + n)[:, None] * SIZE + e[None, :]
        gain = tl.load(p, mask=inside, other=0.0)
        # Summed without what comes later, not taken off a sum with it: the past keeps all its digits.
        earlier = tl.sum(tl.where((a[None, :] < a[:, None])[:, :, None], gain[None, :, :], 0.0), axis=1)
        tl.store(p, state[None, :] + earlier, mask=inside)
        state += tl.sum(gain, axis=0)
    if S1:
        tl.store(s1 + row * SIZE + e, state, mask=ok)
