# mypy: ignore-errors
# ruff: noqa: SIM102  (a condition known to the compiler stands alone)
"""Gradients of the keys of hybrid attention: one program per tile of L tokens of a key head, all its queries.

    keys      d k_i   = scale sum_t ds_ti q_t
              d v_i   = sum_t p_ti do_t + sum_t w_ti gate_t do_t + psi_i dS
    features  d psi_i = sum_t share_t ((gate_t do_t) . v_i - delta_t) phi_t + dS v_i + dz
    chosen    the first two for the list of chosen tokens, for a part of the queries each

The sums over t are over the queries to which the tile is near, of all query heads; dS and dz, the gradients of what the
tile's chunk adds to the sums, stand for the others. A token that was chosen gets what its slot got. The columns of all
products are queries: no product is turned round to be an operand.
Tensors: see hybrid_forward and hybrid_query_grad. slots (B, HS, T) int32: where in the list a token is, -1 nowhere.
chosen_dk, chosen_dv, chosen_dpsi: fp32, like chosen_k ...
"""

import triton
import triton.language as tl

from linattn.kernels.hybrid.device.forward import LOG2E
from linattn.kernels.hybrid.device.parts import exact_pairs, linear_pairs, matrix_of, pair_weights, rows_of, turned_of


@triton.jit
def from_queries(
    ks, vs, qs, gs, exact, names, row, i, level, delta, flow, best_key, unit, dk, dv,
    BEST: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds; keys are rows, queries columns."""
    logits = tl.dot(ks, tl.trans(qs), input_precision=PREC) * unit
    weights = tl.where(exact, tl.exp2(logits - tl.load(level + row + i)[None, :]), 0.0)
    dv = tl.dot(weights.to(DT), gs, dv, input_precision=PREC)
    dp = tl.dot(vs, tl.trans(gs), input_precision=PREC)
    ds = weights * (dp - tl.load(delta + row + i)[None, :])
    if BEST:
        best = tl.load(best_key + row + i)
        ds += tl.where(names == best[None, :], tl.load(flow + row + i)[None, :], 0.0)
    dk = tl.dot(ds.to(DT), qs, dk, input_precision=PREC)
    return dk, dv


@triton.jit(do_not_specialize=["T", "H", "HS", "N", "chunks", "window", "scale"])
def keys(
    q, q_b, q_h, q_t, k, k_b, k_h, k_t, v, v_b, v_h, v_t, phi, phi_b, phi_h, phi_t, psi, psi_b, psi_h, psi_t,
    gate, gate_b, gate_h, gate_t, d_out, d_b, d_h, d_t, d_states, chosen_dk, chosen_dv, slots, ends, first,
    level, share, delta, flow, best_key, d_k, d_v,
    T, H, HS, N, chunks, window, scale,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr,
    L: tl.constexpr, R: tl.constexpr, BACK: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr,
    SLIDING: tl.constexpr, NAMED: tl.constexpr, CHOSEN: tl.constexpr, GATE: tl.constexpr, BEST: tl.constexpr,
    BF16: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    tiles = chunks * R
    tile = pid % tiles
    head = pid // tiles
    b = head // HS
    hs = head % HS
    own = (tile // R).to(tl.int32)
    at = tile * L
    i = tl.arange(0, L)
    ek = tl.arange(0, BK)
    ev = tl.arange(0, BV)
    names = (at + i).to(tl.int32)
    row0 = tl.load(first + b)
    if LINEAR:
        psi += b * psi_b + hs * psi_h
    ks = rows_of(k + b * k_b + hs * k_h, at, k_t, i, ek, K, BK).to(DT)
    vs = rows_of(v + b * v_b + hs * v_h, at, v_t, i, ev, V, BV).to(DT)
    until = tl.load(ends + head * T + at + i) if CHOSEN else i
    unit = scale * LOG2E
    dk = tl.zeros([L, BK], tl.float32)
    dv = tl.zeros([L, BV], tl.float32)
    count = (tl.minimum((own + BACK + 1) * R, tiles) - tile).to(tl.int32)
    for n in tl.range(0, count * GROUP, num_stages=STAGES):
        h = hs * GROUP + n // count
        j = tile + n % count
        c = (j // R).to(tl.int32)
        there = j * L
        t = (there + i).to(tl.int32)
        row = (b * H + h) * T + there
        qs = rows_of(q + b * q_b + h * q_h, there, q_t, i, ek, K, BK).to(DT)
        gs = rows_of(d_out + b * d_b + h * d_h, there, d_t, i, ev, V, BV)
        exact = exact_pairs(t[None, :], names[:, None], row0, until[:, None], c, window, SLIDING, NAMED)
        dk, dv = from_queries(
            ks, vs, qs, gs.to(DT), exact, names[:, None], row, i, level, delta, flow, best_key, unit, dk, dv,
            BEST, DT, PREC,
        )  # fmt: skip
        if LINEAR and SLIDING:
            if there + L - 1 - at >= window:
                weights = pair_weights(psi, psi_t, at, phi + b * phi_b + h * phi_h, phi_t, there, i, F, BF, DT, PREC)
                others = linear_pairs(t[None, :], names[:, None], row0, until[:, None], c, window, NAMED)
                weights = tl.where(others, weights * tl.load(share + row + i)[None, :], 0.0)
                gated = gs.to(tl.float32)
                if GATE:
                    gated = gated * rows_of(gate + b * gate_b + h * gate_h, there, gate_t, i, ev, V, BV).to(tl.float32)
                dv = tl.dot(weights.to(DT), gated.to(DT), dv, input_precision=PREC)
    dk = dk * scale
    if LINEAR:
        e = own + BACK
        if e < chunks:
            joins = names >= row0
            if CHOSEN:
                joins = until <= e + 1
            state = head * chunks + e
            for f in tl.static_range(0, F, BF):
                ef = f + tl.arange(0, BF)
                ps = rows_of(psi, at, psi_t, i, ef, F, BF)
                ps = tl.where(joins[:, None], ps, 0.0).to(DT)
                S = matrix_of(d_states + state * F * V, ef, ev, F, V, BF, BV).to(DT)
                dv = tl.dot(ps, S, dv, input_precision=PREC)
    if CHOSEN:
        slot = tl.load(slots + head * T + at + i)
        place = (head * N + slot)[:, None]
        listed = (slot >= 0)[:, None]
        dk += tl.load(chosen_dk + place * K + ek[None, :], mask=listed & (ek < K)[None, :], other=0.0)
        dv += tl.load(chosen_dv + place * V + ev[None, :], mask=listed & (ev < V)[None, :], other=0.0)
    row = head * T + at
    tl.store(d_k + row * K + i[:, None] * K + ek[None, :], dk.to(d_k.dtype.element_ty), mask=(ek < K)[None, :])
    tl.store(d_v + row * V + i[:, None] * V + ev[None, :], dv.to(d_v.dtype.element_ty), mask=(ev < V)[None, :])


@triton.jit(do_not_specialize=["T", "H", "HS", "N", "chunks", "window"])
def features(
    v, v_b, v_h, v_t, phi, phi_b, phi_h, phi_t, gate, gate_b, gate_h, gate_t, d_out, d_b, d_h, d_t,
    d_states, d_sums, chosen_dpsi, slots, ends, first, share, delta, d_psi,
    T, H, HS, N, chunks, window,
    V: tl.constexpr, F: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    BACK: tl.constexpr, GROUP: tl.constexpr, SLIDING: tl.constexpr, NAMED: tl.constexpr, CHOSEN: tl.constexpr,
    ENDING: tl.constexpr, GATE: tl.constexpr, BF16: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # ENDING: chosen tokens may stop to be exact, and their features count.
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    TILES: tl.constexpr = (F + BF - 1) // BF
    pid = tl.program_id(0).to(tl.int64)
    part = pid % TILES
    pid = pid // TILES
    tiles = chunks * R
    tile = pid % tiles
    head = pid // tiles
    b = head // HS
    hs = head % HS
    own = (tile // R).to(tl.int32)
    at = tile * L
    i = tl.arange(0, L)
    ev = tl.arange(0, BV)
    ef = (part * BF).to(tl.int32) + tl.arange(0, BF)
    names = (at + i).to(tl.int32)
    row0 = tl.load(first + b)
    vs = rows_of(v + b * v_b + hs * v_h, at, v_t, i, ev, V, BV).to(DT)
    until = tl.load(ends + head * T + at + i) if CHOSEN else i
    d = tl.zeros([L, BF], tl.float32)
    e = own + BACK
    if e < chunks:
        state = head * chunks + e
        S = turned_of(d_states + state * F * V, ef, ev, F, V, BF, BV).to(DT)
        z = tl.load(d_sums + state * F + ef, mask=ef < F, other=0.0)
        joins = names >= row0
        if CHOSEN:
            joins = joins & (until <= e + 1)
        d = tl.where(joins[:, None], tl.dot(vs, S, input_precision=PREC) + z[None, :], 0.0)
    if SLIDING:
        count = (tl.minimum((own + BACK + 1) * R, tiles) - tile).to(tl.int32)
        for n in tl.range(0, count * GROUP, num_stages=1):
            h = hs * GROUP + n // count
            j = tile + n % count
            c = (j // R).to(tl.int32)
            there = j * L
            t = (there + i).to(tl.int32)
            if there + L - 1 - at >= window:
                row = (b * H + h) * T + there
                xs = rows_of(phi + b * phi_b + h * phi_h, there, phi_t, i, ef, F, BF).to(DT)
                gs = rows_of(d_out + b * d_b + h * d_h, there, d_t, i, ev, V, BV).to(tl.float32)
                if GATE:
                    gs = gs * rows_of(gate + b * gate_b + h * gate_h, there, gate_t, i, ev, V, BV).to(tl.float32)
                dw = tl.dot(vs, tl.trans(gs.to(DT)), input_precision=PREC) - tl.load(delta + row + i)[None, :]
                others = linear_pairs(t[None, :], names[:, None], row0, until[:, None], c, window, NAMED)
                dw = tl.where(others, dw * tl.load(share + row + i)[None, :], 0.0)
                d = tl.dot(dw.to(DT), xs, d, input_precision=PREC)
    if ENDING:
        slot = tl.load(slots + head * T + at + i)
        p = chosen_dpsi + (head * N + slot)[:, None] * F + ef[None, :]
        d += tl.load(p, mask=(slot >= 0)[:, None] & (ef < F)[None, :], other=0.0)
    p = d_psi + (head * T + at) * F + i[:, None] * F + ef[None, :]
    tl.store(p, d.to(d_psi.dtype.element_ty), mask=(ef < F)[None, :])


@triton.jit(do_not_specialize=["T", "H", "HS", "N", "chunks", "PARTS", "scale"])
def chosen(
    q, q_b, q_h, q_t, d_out, d_b, d_h, d_t, chosen_k, chosen_v, begin, end, level, delta, flow, best_key,
    chosen_dk, chosen_dv,
    T, H, HS, N, chunks, PARTS, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, BN: tl.constexpr,
    R: tl.constexpr, GROUP: tl.constexpr, BEST: tl.constexpr, BF16: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # A program has BN slots of a key head and every PARTS-th tile of queries.
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    part = (pid % PARTS).to(tl.int32)
    rest = pid // PARTS
    blocks = N // BN
    head = rest // blocks
    s = (rest % blocks) * BN
    b = head // HS
    hs = head % HS
    i = tl.arange(0, L)
    n = tl.arange(0, BN)
    ek = tl.arange(0, BK)
    ev = tl.arange(0, BV)
    slot = head * N + s
    ks = rows_of(chosen_k, slot, K, n, ek, K, BK).to(DT)
    vs = rows_of(chosen_v, slot, V, n, ev, V, BV).to(DT)
    since = tl.load(begin + slot + n)
    until = tl.load(end + slot + n)
    names = (T + s + n).to(tl.int32)
    unit = scale * LOG2E
    dk = tl.zeros([BN, BK], tl.float32)
    dv = tl.zeros([BN, BV], tl.float32)
    counting = until > since
    low = tl.min(tl.where(counting, since, chunks)) * R
    high = tl.minimum(tl.max(tl.where(counting, until, 0)), chunks) * R
    count = tl.maximum(high - low - part + PARTS - 1, 0) // PARTS
    for m in tl.range(0, count * GROUP, num_stages=STAGES):
        h = hs * GROUP + m // count
        j = low + part + m % count * PARTS
        c = j // R
        there = (slot * 0 + j) * L
        row = (b * H + h) * T + there
        qs = rows_of(q + b * q_b + h * q_h, there, q_t, i, ek, K, BK).to(DT)
        gs = rows_of(d_out + b * d_b + h * d_h, there, d_t, i, ev, V, BV).to(DT)
        exact = ((since <= c) & (until > c))[:, None] & (i >= 0)[None, :]
        dk, dv = from_queries(
            ks, vs, qs, gs, exact, names[:, None], row, i, level, delta, flow, best_key, unit, dk, dv, BEST, DT, PREC,
        )  # fmt: skip
    row = (part * HS * (tl.num_programs(0) // (PARTS * blocks * HS)) + head) * N + s
    tl.store(chosen_dk + row * K + n[:, None] * K + ek[None, :], dk * scale, mask=(ek < K)[None, :])
    tl.store(chosen_dv + row * V + n[:, None] * V + ev[None, :], dv, mask=(ev < V)[None, :])
