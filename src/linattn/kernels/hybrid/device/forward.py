# mypy: ignore-errors
# ruff: noqa: SIM102  (a condition known to the compiler stands alone)
"""Outputs of hybrid attention: one program per tile of L queries of a head, all its keys, one denominator.

    near     tiles of keys of the chunks c - BACK .. c: exact, or linear pair by pair where a sliding window ends
    chosen   blocks of BN slots of the list of chosen tokens, those that count in chunk c: begin <= c < end
    state    phi . S_c, phi . z_c over all others

    q, phi, gate (B, H, T, .)   k, v, psi (B, HS, T, .)   chosen_k, chosen_v (B, HS, N, .)   begin, end (B, HS, N) int32
    spans (B, HS, chunks, 2) int32: the slots that may count    ends (B, HS, T) int32, see parts
    states (B, HS, chunks, F, V), sums (B, HS, chunks, F) fp32   first (B,) int32: the first token that is there
    out (B, H, T, V)
    level (B, H, T) fp32: an exact weight over the denominator is 2^(logit - level)
    share (B, H, T) fp32: a linear one is share phi . psi
    best  (B, H, T) int32: the strongest exact key, T + slot of chosen ones, -1 of none

Programs of late tiles, which see most chosen tokens, come first.
"""

import triton
import triton.language as tl

from linattn.kernels.hybrid.device.parts import exact_pairs, linear_pairs, matrix_of, pair_weights, rows_of

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SIZES = ["T", "H", "HS", "N", "chunks", "window", "scale", "eps"]


@triton.jit
def take_in(logits, exact, vs, names, top, total, acc, best, BEST: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """Exact weights of one more tile of keys, in units of the largest so far."""
    logits = tl.where(exact, logits, -float("inf"))
    most = tl.max(logits, axis=1)
    if BEST:
        found = tl.max(tl.where(exact & (logits == most[:, None]), names, -1), axis=1)
        best = tl.where(most > top, found, best)
    new = tl.maximum(top, most)
    unit = tl.where(new == -float("inf"), 0.0, new)
    weights = tl.exp2(logits - unit[:, None])
    keep = tl.exp2(top - unit)
    total = total * keep + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(DT), vs, acc * keep[:, None], input_precision=PREC)
    return new, total, acc, best


@triton.jit(do_not_specialize=SIZES)
def outputs(
    q, q_b, q_h, q_t, k, k_b, k_h, k_t, v, v_b, v_h, v_t, phi, phi_b, phi_h, phi_t, psi, psi_b, psi_h, psi_t,
    gate, gate_b, gate_h, gate_t, states, sums, chosen_k, chosen_v, begin, end, spans, ends, first,
    out, level, share, best_key,
    T, H, HS, N, chunks, window, scale, eps,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr,
    L: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, BACK: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr,
    SLIDING: tl.constexpr, NAMED: tl.constexpr, CHOSEN: tl.constexpr, GATE: tl.constexpr, ONE: tl.constexpr,
    BEST: tl.constexpr, BF16: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # LINEAR: there are features. NAMED: chosen tokens inside sliding windows. ONE: units="one". BEST: best is wanted.
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    PAIRS: tl.constexpr = LINEAR and SLIDING
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

    i = tl.arange(0, L)
    ek = tl.arange(0, BK)
    ev = tl.arange(0, BV)
    t = (at + i).to(tl.int32)
    k += b * k_b + hs * k_h
    v += b * v_b + hs * v_h
    if LINEAR:
        phi += b * phi_b + h * phi_h
        psi += b * psi_b + hs * psi_h
    row0 = tl.load(first + b)
    qs = rows_of(q + b * q_b + h * q_h, at, q_t, i, ek, K, BK).to(DT)
    unit = scale * LOG2E

    top = tl.full([L], -float("inf"), tl.float32)
    total = tl.zeros([L], tl.float32)
    acc = tl.zeros([L, BV], tl.float32)
    best = tl.full([L], -1, tl.int32)
    lin = tl.zeros([L, BV], tl.float32)
    lin_total = tl.zeros([L], tl.float32)

    low = tl.maximum(c - BACK, 0) * R
    for j in tl.range(low, (tile + 1).to(tl.int32), num_stages=STAGES):
        there = (tile * 0 + j) * L
        ks = rows_of(k, there, k_t, i, ek, K, BK).to(DT)
        vs = rows_of(v, there, v_t, i, ev, V, BV).to(DT)
        names = (there + i).to(tl.int32)
        until = tl.load(ends + head * T + there + i) if NAMED else i
        logits = tl.dot(qs, tl.trans(ks), input_precision=PREC) * unit
        exact = exact_pairs(t[:, None], names[None, :], row0, until[None, :], c, window, SLIDING, NAMED)
        top, total, acc, best = take_in(logits, exact, vs, names[None, :], top, total, acc, best, BEST, DT, PREC)
        if PAIRS:
            if at + L - 1 - there >= window:
                weights = pair_weights(phi, phi_t, at, psi, psi_t, there, i, F, BF, DT, PREC)
                others = linear_pairs(t[:, None], names[None, :], row0, until[None, :], c, window, NAMED)
                weights = tl.where(others, weights, 0.0)
                lin = tl.dot(weights.to(DT), vs, lin, input_precision=PREC)
                lin_total += tl.sum(weights, axis=1)

    if CHOSEN:
        place = (head * chunks + c) * 2
        n = tl.arange(0, BN)
        for s in tl.range(tl.load(spans + place), tl.load(spans + place + 1), BN, num_stages=STAGES):
            slot = head * N + s
            ks = rows_of(chosen_k, slot, K, n, ek, K, BK).to(DT)
            vs = rows_of(chosen_v, slot, V, n, ev, V, BV).to(DT)
            counts = (tl.load(begin + slot + n) <= c) & (tl.load(end + slot + n) > c)
            logits = tl.dot(qs, tl.trans(ks), input_precision=PREC) * unit
            exact = counts[None, :] & (t >= 0)[:, None]
            names = (T + s + n)[None, :]
            top, total, acc, best = take_in(logits, exact, vs, names, top, total, acc, best, BEST, DT, PREC)

    if LINEAR:
        state = head * chunks + c
        for f in tl.static_range(0, F, BF):
            ef = f + tl.arange(0, BF)
            xs = rows_of(phi, at, phi_t, i, ef, F, BF)
            S = matrix_of(states + state * F * V, ef, ev, F, V, BF, BV).to(DT)
            z = tl.load(sums + state * F + ef, mask=ef < F, other=0.0)
            lin = tl.dot(xs.to(DT), S, lin, input_precision=PREC)
            lin_total += tl.sum(xs.to(tl.float32) * z[None, :], axis=1)

    alone = top == -float("inf")
    log_unit = tl.where(alone, 0.0, top)
    other = tl.full([L], 1.0, tl.float32)
    if ONE:
        log_unit = tl.where(alone, 0.0, tl.maximum(top, tl.log2(tl.maximum(lin_total, 0.0))))
        own = tl.exp2(tl.where(alone, 0.0, top - log_unit))
        acc = acc * own[:, None]
        total = total * own
        other = tl.exp2(tl.minimum(-log_unit, 80.0 * LOG2E))
    den = total + lin_total * other + tl.where(alone, eps, 0.0)
    den = tl.where(alone & (den == 0.0), 1.0, den)
    if LINEAR:
        if GATE:
            lin = lin * rows_of(gate + b * gate_b + h * gate_h, at, gate_t, i, ev, V, BV).to(tl.float32)
        acc += lin * other[:, None]
    acc = acc * (1.0 / den)[:, None]
    row = line * T + at
    tl.store(out + row * V + i[:, None] * V + ev[None, :], acc.to(out.dtype.element_ty), mask=(ev < V)[None, :])
    tl.store(level + row + i, log_unit + tl.log2(den))
    tl.store(share + row + i, other / den)
    if BEST:
        tl.store(best_key + row + i, best)
