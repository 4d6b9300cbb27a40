# mypy: ignore-errors
"""Gradients of the queries of hybrid attention, one program per tile of L queries of a head.

With p an exact and w a linear weight over the denominator, o the output, do its gradient, delta = do . o:

    linear_part   d phi_t  = sum_i share_t ((gate do_t) . v_i - delta_t) psi_i,   over pairs and over the sums
                  d gate_t = do_t share_t (phi_t . S)
                  flow_t   = phi_t . d phi_t
    exact_part    d q_t    = scale (sum_i p_ti (do_t . v_i - delta_t) k_i + flow_t k_best)

flow is the gradient of the largest logit, in whose unit the exact weights are: raising it lowers all of them relative
to the linear weights, whose gradients sum up to the opposite. In units of one there is no flow.
Tensors: see hybrid_forward; d_out and what has its shape likewise; delta, flow (B, H, T) fp32.
"""

import triton
import triton.language as tl

from linattn.kernels.hybrid.device.forward import LOG2E
from linattn.kernels.hybrid.device.parts import exact_pairs, linear_pairs, matrix_of, pair_weights, rows_of, turned_of


@triton.jit(do_not_specialize=["T", "H", "HS", "chunks", "window"])
def linear_part(
    v, v_b, v_h, v_t, phi, phi_b, phi_h, phi_t, psi, psi_b, psi_h, psi_t, gate, gate_b, gate_h, gate_t,
    d_out, d_b, d_h, d_t, out, states, sums, ends, first, share, delta, flow, d_phi, d_gate,
    T, H, HS, chunks, window,
    V: tl.constexpr, F: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    BACK: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, SLIDING: tl.constexpr, NAMED: tl.constexpr,
    GATE: tl.constexpr, BF16: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    tiles = chunks * R
    tile = pid % tiles
    line = pid // tiles
    b = line // H
    h = line % H
    hs = h // GROUP
    head = b * HS + hs
    c = (tile // R).to(tl.int32)
    at = tile * L
    row = line * T + at
    i = tl.arange(0, L)
    ev = tl.arange(0, BV)
    t = (at + i).to(tl.int32)
    gs = rows_of(d_out + b * d_b + h * d_h, at, d_t, i, ev, V, BV).to(tl.float32)
    os = rows_of(out, row, V, i, ev, V, BV).to(tl.float32)
    D = tl.sum(gs * os, axis=1)
    tl.store(delta + row + i, D)
    if LINEAR:
        v += b * v_b + hs * v_h
        phi += b * phi_b + h * phi_h
        psi += b * psi_b + hs * psi_h
        row0 = tl.load(first + b)
        r = tl.load(share + row + i)
        gated = gs
        if GATE:
            gated = gs * rows_of(gate + b * gate_b + h * gate_h, at, gate_t, i, ev, V, BV).to(tl.float32)
        gated = gated.to(DT)
        low = tl.maximum(c - BACK, 0) * R
        stop = (tile + 1).to(tl.int32)
        state = head * chunks + c
        most = tl.zeros([L], tl.float32)
        for f in tl.static_range(0, F, BF):
            ef = f + tl.arange(0, BF)
            z = tl.load(sums + state * F + ef, mask=ef < F, other=0.0)
            S = turned_of(states + state * F * V, ef, ev, F, V, BF, BV).to(DT)
            d = tl.dot(gated, S, input_precision=PREC) - D[:, None] * z[None, :]
            if SLIDING:
                for j in tl.range(low, stop, num_stages=1):
                    there = (tile * 0 + j) * L
                    if at + L - 1 - there >= window:
                        vs = rows_of(v, there, v_t, i, ev, V, BV).to(DT)
                        ps = rows_of(psi, there, psi_t, i, ef, F, BF).to(DT)
                        names = (there + i).to(tl.int32)
                        until = tl.load(ends + head * T + there + i) if NAMED else i
                        others = linear_pairs(t[:, None], names[None, :], row0, until[None, :], c, window, NAMED)
                        dw = tl.dot(gated, tl.trans(vs), input_precision=PREC) - D[:, None]
                        dw = tl.where(others, dw, 0.0)
                        d = tl.dot(dw.to(DT), ps, d, input_precision=PREC)
            d = d * r[:, None]
            xs = rows_of(phi, at, phi_t, i, ef, F, BF)
            most += tl.sum(d * xs.to(tl.float32), axis=1)
            tl.store(
                d_phi + row * F + i[:, None] * F + ef[None, :], d.to(d_phi.dtype.element_ty), mask=(ef < F)[None, :]
            )
        tl.store(flow + row + i, most)
        if GATE:
            # A loop of its own: beside the gradients of phi its sums would not fit into registers.
            lin = tl.zeros([L, BV], tl.float32)
            for f in tl.static_range(0, F, BF):
                ef = f + tl.arange(0, BF)
                xs = rows_of(phi, at, phi_t, i, ef, F, BF)
                S = matrix_of(states + state * F * V, ef, ev, F, V, BF, BV).to(DT)
                lin = tl.dot(xs.to(DT), S, lin, input_precision=PREC)
            if SLIDING:
                for j in tl.range(low, stop, num_stages=1):
                    there = (tile * 0 + j) * L
                    if at + L - 1 - there >= window:
                        vs = rows_of(v, there, v_t, i, ev, V, BV).to(DT)
                        names = (there + i).to(tl.int32)
                        until = tl.load(ends + head * T + there + i) if NAMED else i
                        weights = pair_weights(phi, phi_t, at, psi, psi_t, there, i, F, BF, DT, PREC)
                        others = linear_pairs(t[:, None], names[None, :], row0, until[None, :], c, window, NAMED)
                        weights = tl.where(others, weights, 0.0)
                        lin = tl.dot(weights.to(DT), vs, lin, input_precision=PREC)
            gs = rows_of(d_out + b * d_b + h * d_h, at, d_t, i, ev, V, BV).to(tl.float32)
            dg = gs * lin * r[:, None]
            tl.store(
                d_gate + row * V + i[:, None] * V + ev[None, :], dg.to(d_gate.dtype.element_ty), mask=(ev < V)[None, :]
            )


@triton.jit
def gradient_of_logits(logits, exact, level, dp, delta):
    """p (dp - delta), without anything of pairs that are not exact."""
    weights = tl.where(exact, tl.exp2(logits - level), 0.0)
    return weights, weights * (dp - delta)


@triton.jit(do_not_specialize=["T", "H", "HS", "N", "chunks", "window", "scale"])
def exact_part(
    q, q_b, q_h, q_t, k, k_b, k_h, k_t, v, v_b, v_h, v_t, d_out, d_b, d_h, d_t,
    chosen_k, chosen_v, begin, end, spans, ends, first, level, delta, flow, best_key, d_q,
    T, H, HS, N, chunks, window, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, BN: tl.constexpr,
    R: tl.constexpr, BACK: tl.constexpr, GROUP: tl.constexpr, SLIDING: tl.constexpr, NAMED: tl.constexpr,
    CHOSEN: tl.constexpr, BEST: tl.constexpr, BF16: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    lines = tl.num_programs(0) // (chunks * R)
    line = pid % lines
    tile = (chunks * R - 1 - pid // lines).to(tl.int64)
    b = line // H
    h = line % H
    hs = h // GROUP
    head = b * HS + hs
    c = (tile // R).to(tl.int32)
    at = tile * L
    row = line * T + at
    i = tl.arange(0, L)
    ek = tl.arange(0, BK)
    ev = tl.arange(0, BV)
    t = (at + i).to(tl.int32)
    k += b * k_b + hs * k_h
    v += b * v_b + hs * v_h
    row0 = tl.load(first + b)
    qs = rows_of(q + b * q_b + h * q_h, at, q_t, i, ek, K, BK).to(DT)
    gs = rows_of(d_out + b * d_b + h * d_h, at, d_t, i, ev, V, BV).to(DT)
    D = tl.load(delta + row + i)
    level_t = tl.load(level + row + i)
    unit = scale * LOG2E
    dq = tl.zeros([L, BK], tl.float32)

    for j in tl.range(tl.maximum(c - BACK, 0) * R, (tile + 1).to(tl.int32), num_stages=STAGES):
        there = (tile * 0 + j) * L
        ks = rows_of(k, there, k_t, i, ek, K, BK).to(DT)
        vs = rows_of(v, there, v_t, i, ev, V, BV).to(DT)
        names = (there + i).to(tl.int32)
        until = tl.load(ends + head * T + there + i) if NAMED else i
        exact = exact_pairs(t[:, None], names[None, :], row0, until[None, :], c, window, SLIDING, NAMED)
        logits = tl.dot(qs, tl.trans(ks), input_precision=PREC) * unit
        dp = tl.dot(gs, tl.trans(vs), input_precision=PREC)
        _, ds = gradient_of_logits(logits, exact, level_t[:, None], dp, D[:, None])
        dq = tl.dot(ds.to(DT), ks, dq, input_precision=PREC)

    if CHOSEN:
        place = (head * chunks + c) * 2
        n = tl.arange(0, BN)
        for s in tl.range(tl.load(spans + place), tl.load(spans + place + 1), BN, num_stages=STAGES):
            slot = head * N + s
            ks = rows_of(chosen_k, slot, K, n, ek, K, BK).to(DT)
            vs = rows_of(chosen_v, slot, V, n, ev, V, BV).to(DT)
            counts = (tl.load(begin + slot + n) <= c) & (tl.load(end + slot + n) > c)
            exact = counts[None, :] & (t >= 0)[:, None]
            logits = tl.dot(qs, tl.trans(ks), input_precision=PREC) * unit
            dp = tl.dot(gs, tl.trans(vs), input_precision=PREC)
            _, ds = gradient_of_logits(logits, exact, level_t[:, None], dp, D[:, None])
            dq = tl.dot(ds.to(DT), ks, dq, input_precision=PREC)

    if BEST:
        best = tl.load(best_key + row + i)
        more = tl.where(best >= 0, tl.load(flow + row + i), 0.0)
        near = (best >= 0) & (best < T)
        columns = (ek < K)[None, :]
        found = tl.load(k + best[:, None].to(tl.int64) * k_t + ek[None, :], mask=near[:, None] & columns, other=0.0)
        dq += more[:, None] * found.to(tl.float32)
        if CHOSEN:
            p = chosen_k + (head * N + best - T)[:, None] * K + ek[None, :]
            found = tl.load(p, mask=(best >= T)[:, None] & columns, other=0.0)
            dq += more[:, None] * found.to(tl.float32)
    p = d_q + row * K + i[:, None] * K + ek[None, :]
    tl.store(p, (dq * scale).to(d_q.dtype.element_ty), mask=(ek < K)[None, :])
