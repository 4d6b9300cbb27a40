"""Backward, against the sequence: dk and the decay's gradient.

One program per (query head, segment, K part, V part) walks its chunks from the last, with the gradient of the state
after the chunk, transposed (BV, BK), in registers:

    dk_s = 2^(P_C - P_s) (dS v_s + dz) + sum_t w_ts dA_ts q_t,       dA_ts = y_t . v_s + e_t
    dS <- 2^P_C dS + sum_t 2^P_t q_t y_t,                            dz <- 2^P_C dz + sum_t 2^P_t q_t e_t
    da_t = flux + sum_{j >= t in chunk} (q_j dq_j - k_j dk_j)

``flux`` (BK,) is ``sum_v dS S`` at the end of the chunk: what all decays of the chunk together do to later tokens. At
the end of a segment it is taken from the states; chunk by chunk the sum of q dq - k dk is added, in fp32. An error of
one chunk is thus an error of all earlier tokens of the segment, and multiplied by the length of the segment in a sum
over tokens, such as the gradient of a gate's bias. So rounding must cancel or not occur: q dq, which ``query_grad`` has
left in da, is made of scaled queries as they are rounded for products, and k dk here likewise of scaled keys; S there
and dS here, which no other walk has, are multiplied in two parts; and states of segments are rounded as in the walks.

Pairs inside a chunk are done here where the decay is mild (see ``decays``), which ``query_grad`` has decided: chunks in
``strong`` (NK, NV, B, H, slots, 2) are left to ``near_grad``. Deciding again could give another result at the limit.
dk, da (NV, B, H, T, K), d_kv (N, H, K, V), d_z (N, H, K).
"""
# mypy: ignore-errors
# ruff: noqa: SIM102 - conditions at compile time stay apart from those at run time

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
    sums_of,
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
def key_grad_kernel(
    q, k, v, a, d_o, scale, e, mask, table, start_kv, start_z, final_kv, final_z, end_kv, end_z,
    dk, da, strong, d_kv, d_z,
    q_b, q_h, q_t: tl.constexpr, k_b, k_h, k_t: tl.constexpr, v_b, v_h, v_t: tl.constexpr,
    a_b, a_h, a_t: tl.constexpr, g_b, g_h, g_t: tl.constexpr, m_b, m_t,
    B, H, G, T, span, segments, slots,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    C: tl.constexpr, NORMALIZED: tl.constexpr,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, SEGMENTED: tl.constexpr,
    HAS_START: tl.constexpr, HAS_END: tl.constexpr, EXACT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    kt, vt = (pid // NV) % NK, pid % NV
    segment = (pid // (NK * NV)) % segments
    bh = pid // (NK * NV * segments)
    b, h, hk = bh // H, bh % H, (bh % H) // G
    start, end, sequence, first, last = place(table, b, segment, T, span, PACKED)
    r, ck, cv = tl.arange(0, C), (kt * BK).to(tl.int32) + tl.arange(0, BK), (vt * BV).to(tl.int32) + tl.arange(0, BV)
    q += b * q_b + h * q_h
    k += b * k_b + hk * k_h
    v += b * v_b + hk * v_h
    a += b * a_b + hk * a_h
    d_o += b * g_b + h * g_h
    mask += b * m_b
    part = vt * B * H + bh
    dk += part * T * K
    da += part * T * K
    strong += (((kt * NV + vt) * B * H + bh) * slots + start // C + segment) * 2
    in_state = (ck < K)[None, :] & (cv < V)[:, None]
    cell = ck[None, :] * V + cv[:, None]
    state_row = (b + sequence) * (H // G) + hk
    grad = tl.zeros((BV, BK), dtype=tl.float32)
    grad_z = tl.zeros((BK,), dtype=tl.float32)
    flux = tl.zeros((BK,), dtype=tl.float32)
    at_last = end == last
    at_end = spread(end, ck) == last
    if SEGMENTED:
        row = bh * segments + segment
        grad = tl.load(end_kv + row * K * V + cell, mask=in_state, other=0.0)
        grad_z = tl.load(end_z + row * K + ck, mask=(ck < K) & (spread(vt, ck) == 0), other=0.0)
        row = (b * (H // G) + hk) * segments + segment + 1
        inside = in_state & (spread(end, ck) < last)[None, :]
        flux = tl.sum(grad * tl.load(start_kv + row * K * V + cell, mask=inside, other=0.0), 0)
        flux += grad_z * tl.load(start_z + row * K + ck, mask=(ck < K) & (spread(end, ck) < last), other=0.0)
    elif HAS_END:
        own = spread(h % G, ck) == 0  # the state's gradient goes to the first head of a group
        grad = tl.load(end_kv + state_row * K * V + cell, mask=in_state & own[None, :], other=0.0)
        grad_z = tl.load(end_z + state_row * K + ck, mask=(ck < K) & (spread(vt, ck) == 0) & own, other=0.0)
    if HAS_END:
        final = tl.load(final_kv + state_row * K * V + cell, mask=in_state & at_end[None, :], other=0.0)
        flux += tl.sum(grad * final, 0)
        flux += grad_z * tl.load(final_z + state_row * K + ck, mask=(ck < K) & at_end, other=0.0)
    chunks = (end - start + C - 1) // C
    for i in range(0, chunks):
        slot = chunks - 1 - i
        chunk = start + slot * C
        live = tokens(end, chunk, C)
        keys = live_keys(mask + chunk * m_t, m_t, live, C, MASKED)
        following = tl.maximum(chunk - C, start)
        fetch(a + decay_row(following, first, SHIFT) * a_t, a_t, end - following, kt * BK, BK, C)
        fetch(k + following * k_t, k_t, end - following, kt * BK, BK, C)
        fetch(q + following * q_t, q_t, end - following, kt * BK, BK, C)
        fetch(v + following * v_t, v_t, end - following, vt * BV, BV, C)
        fetch(d_o + following * g_t, g_t, end - following, vt * BV, BV, C)
        fetch(da + following * K, K, end - following, kt * BK, BK, C)
        a_c, decaying = load_decay(
            a + chunk * a_t, mask + chunk * m_t, a_t, m_t, chunk, first, end, ck, K, C, SHIFT, MASKED
        )
        a_c = rounded(a_c, EXACT, DT)
        q_c = load_rows(q + chunk * q_t, q_t, live, ck, K, C)
        early, late, _weakest = halves_of(a_c, C)
        mild = tl.load(strong + slot * 2) < 0
        weakest = tl.where(mild, 0.0, -2.0 * LIMIT)
        seen, more, after = passage(late, early, weakest, EXACT)
        of_queries, of_keys = factors(a_c, early, late, weakest, C, EXACT)
        reading = operand(q_c.to(tl.float32) * power(of_queries), DT, PRECISION)
        y = load_rows(d_o + chunk * g_t, g_t, live, cv, V, C)
        e_t = tl.zeros((C,), dtype=tl.float32)
        if NORMALIZED:
            y = y.to(tl.float32) * tl.load(scale + bh * T + chunk + r, mask=live, other=0.0)[:, None]
            e_t = tl.load(e + bh * T + chunk + r, mask=live & (spread(vt, r) == 0), other=0.0)
        y = y.to(DT)
        before, z_before = grad * seen[None, :], grad_z * seen
        grad_z = z_before * more
        if NORMALIZED:
            grad_z += tl.sum(reading.to(tl.float32) * e_t[:, None], 0)
        grad_z *= after
        v_c = load_rows(v + chunk * v_t, v_t, keys, cv, V, C).to(DT)
        found = product_of_sum(v_c, before, DT, PRECISION)
        grad = add_product(before * more[None, :], tl.trans(y), reading, PRECISION) * after[None, :]
        if not EXACT:
            dA = product(v_c, tl.trans(y), PRECISION)  # key by query
            if NORMALIZED:
                dA = added_after(dA, tl.broadcast_to(e_t[None, :], dA.shape))  # to the same digits as in query_grad
            seen_queries = (r[:, None] <= r[None, :]) & (spread(weakest, dA) > -LIMIT)
            found = add_product(found, tl.where(seen_queries, dA, 0.0).to(DT), reading, PRECISION)
        if NORMALIZED | HAS_END:
            found += z_before[None, :]
        weights = power(of_keys)
        k_c = load_rows(k + chunk * k_t, k_t, keys, ck, K, C)
        writing = as_rounded(k_c.to(tl.float32) * weights, DT, PRECISION)
        here = on_rows(live, ck, K)
        at = offsets(ck, K, C)
        dk_found = found * weights
        if MASKED:
            dk_found = tl.where(keys[:, None], dk_found, 0.0)
        tl.store(dk + chunk * K + at, dk_found.to(dk.dtype.element_ty), mask=here)
        # The decay.
        if SHIFT:
            here = here & (r > first - chunk)[:, None]
        change = tl.load(da + (chunk - SHIFT) * K + at, mask=here, other=0.0) - found * writing
        da_found = flux[None, :] + sums_of(tl.where(r[:, None] <= r[None, :], 1.0, 0.0), change, EXACT)
        if MASKED:
            da_found = tl.where(decaying[:, None], da_found, 0.0)
        tl.store(da + (chunk - SHIFT) * K + at, da_found, mask=here)
        flux += tl.sum(change, 0)
    if SHIFT:
        if at_last & (end > start):  # nobody comes after the last token to be decayed by it
            tl.store(da + (last - 1) * K + ck, tl.zeros((BK,), dtype=da.dtype.element_ty), mask=ck < K)
    if HAS_START:
        if (start == first) & (end > start):
            row = (b + sequence) * H + h
            tl.store(d_kv + row * K * V + cell, grad, mask=in_state)
            tl.store(d_z + row * K + ck, grad_z, mask=(ck < K) & (spread(vt, ck) == 0))
