"""Backward, along the sequence: dq, and ``q dq`` channel by channel for the decay.

    dq_t = 2^P_t (S y_t + z e_t) + sum_{s in chunk} w_ts dA_ts k_s,      dA_ts = y_t . v_s + e_t

One program per (query head, segment, K part, V part), with the state transposed (BV, BK) in registers, computed anew.
y = d_o / n, e = the denominator's gradient. dq (NV, B, H, T, K); q dq in fp32 goes where ``key_grad`` makes the decay's
gradient of it, da (NV, B, H, T, K), one token earlier with SHIFT.

Pairs inside a chunk are done here where the decay is mild (see ``decays``). Other chunks are noted in ``strong``
(NK, NV, B, H, slots, 2), their tokens [start, end), for ``key_grad`` and for ``near_grad``, which adds those pairs; the
slots of a segment begin at ``start // C + segment``. q dq is made of the scaled queries as they are rounded for
products: what pairs add to q dq and to k dk is then the same to the last digits of fp32, and cancels where the decay's
gradient sums both. What the state gives has no such partner, and is multiplied in two parts (see ``key_grad``).
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from linattn.kernels.causal.device.parts import added_after
from linattn.kernels.channel_decay.device.decays import (
    LIMIT,
    decay_row,
    factors,
    halves_of,
    load_decay,
    passage,
    power,
    rounded,
)
from linattn.kernels.channel_decay.device.parts import (
    add_product,
    as_rounded,
    fetch,
    live_keys,
    load_rows,
    offsets,
    on_rows,
    operand,
    place,
    product,
    product_of_sum,
    spread,
    tokens,
)


@triton.jit(do_not_specialize=["T", "span", "segments", "slots"])
def query_grad_kernel(
    q, k, v, a, d_o, scale, e, mask, table, start_kv, start_z, dq, da, strong,
    q_b, q_h, q_t: tl.constexpr, k_b, k_h, k_t: tl.constexpr, v_b, v_h, v_t: tl.constexpr,
    a_b, a_h, a_t: tl.constexpr, g_b, g_h, g_t: tl.constexpr, m_b, m_t,
    B, H, G, T, span, segments, slots,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    C: tl.constexpr, NORMALIZED: tl.constexpr,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, SEGMENTED: tl.constexpr,
    HAS_START: tl.constexpr, EXACT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    kt, vt = (pid // NV) % NK, pid % NV
    segment = (pid // (NK * NV)) % segments
    bh = pid // (NK * NV * segments)
    b, h, hk = bh // H, bh % H, (bh % H) // G
    start, end, sequence, first, _ = place(table, b, segment, T, span, PACKED)
    r, dk, dv = tl.arange(0, C), (kt * BK).to(tl.int32) + tl.arange(0, BK), (vt * BV).to(tl.int32) + tl.arange(0, BV)
    q += b * q_b + h * q_h
    k += b * k_b + hk * k_h
    v += b * v_b + hk * v_h
    a += b * a_b + hk * a_h
    d_o += b * g_b + h * g_h
    mask += b * m_b
    dq += (vt * B * H + bh) * T * K
    da += (vt * B * H + bh) * T * K
    strong += (((kt * NV + vt) * B * H + bh) * slots + start // C + segment) * 2
    if HAS_START:
        row = (b + sequence) * (H // G) + hk
        if SEGMENTED:
            row = (b * (H // G) + hk) * segments + segment
        in_state = (dk < K)[None, :] & (dv < V)[:, None]
        state = tl.load(start_kv + row * K * V + dk[None, :] * V + dv[:, None], mask=in_state, other=0.0)
        z = tl.load(start_z + row * K + dk, mask=dk < K, other=0.0)
    else:
        state = tl.zeros((BV, BK), dtype=tl.float32)
        z = tl.zeros((BK,), dtype=tl.float32)
    for chunk in range(start, end, C):
        live = tokens(end, chunk, C)
        keys = live_keys(mask + chunk * m_t, m_t, live, C, MASKED)
        following = tl.minimum(chunk + C, end - 1)
        left = end - following
        fetch(a + decay_row(following, first, SHIFT) * a_t, a_t, left, kt * BK, BK, C)
        fetch(k + following * k_t, k_t, left, kt * BK, BK, C)
        fetch(q + following * q_t, q_t, left, kt * BK, BK, C)
        fetch(v + following * v_t, v_t, left, vt * BV, BV, C)
        fetch(d_o + following * g_t, g_t, left, vt * BV, BV, C)
        a_c, _decaying = load_decay(
            a + chunk * a_t, mask + chunk * m_t, a_t, m_t, chunk, first, end, dk, K, C, SHIFT, MASKED
        )
        a_c = rounded(a_c, EXACT, DT)
        k_c = load_rows(k + chunk * k_t, k_t, keys, dk, K, C)
        early, late, weakest = halves_of(a_c, C)
        seen, more, after = passage(early, late, weakest, EXACT)
        of_queries, of_keys = factors(a_c, early, late, weakest, C, EXACT)
        writing = operand(k_c.to(tl.float32) * power(of_keys), DT, PRECISION)
        v_c = load_rows(v + chunk * v_t, v_t, keys, dv, V, C).to(DT)
        before, z_before = state * seen[None, :], z * seen
        y = load_rows(d_o + chunk * g_t, g_t, live, dv, V, C)
        e_t = tl.zeros((C,), dtype=tl.float32)
        if NORMALIZED:
            y = y.to(tl.float32) * tl.load(scale + bh * T + chunk + r, mask=live, other=0.0)[:, None]
            e_t = tl.load(e + bh * T + chunk + r, mask=live & (spread(vt, r) == 0), other=0.0)
            z = (z_before * more + tl.sum(writing.to(tl.float32), 0)) * after
        y = y.to(DT)
        found = product_of_sum(y, before, DT, PRECISION)
        state = add_product(before * more[None, :], tl.trans(v_c), writing, PRECISION) * after[None, :]
        mild = False
        if not EXACT:
            mild = weakest > -LIMIT
            dA = product(y, tl.trans(v_c), PRECISION)
            seen_keys = (r[:, None] >= r[None, :]) & (spread(weakest, dA) > -LIMIT)
            if NORMALIZED:
                dA = added_after(dA, tl.broadcast_to(e_t[:, None], dA.shape))  # e is read again below
                seen_keys = seen_keys & keys[None, :]
            found = add_product(found, tl.where(seen_keys, dA, 0.0).to(DT), writing, PRECISION)
        if NORMALIZED:
            found += e_t[:, None] * z_before[None, :]
        weights = power(of_queries)
        q_c = load_rows(q + chunk * q_t, q_t, live, dk, K, C)
        reading = as_rounded(q_c.to(tl.float32) * weights, DT, PRECISION)
        here = on_rows(live, dk, K)
        at = offsets(dk, K, C)
        tl.store(dq + chunk * K + at, (found * weights).to(dq.dtype.element_ty), mask=here)
        if SHIFT:
            here = here & (r > first - chunk)[:, None]
        tl.store(da + (chunk - SHIFT) * K + at, found * reading, mask=here)
        tl.store(strong, tl.where(mild, -1, chunk))
        tl.store(strong + 1, tl.minimum(chunk + C, end))
        strong += 2
