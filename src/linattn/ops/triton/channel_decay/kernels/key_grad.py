"""Backward, against the sequence: dk, the rest of dq, and the decay's gradient.

One program per (query head, segment, K part, V part) walks its chunks from the last, with the gradient of the state
after the chunk, transposed (BV, BK), in registers:

    dk_s = exp(P_C - P_s) (dS v_s + dz) + sum_t w_ts dA_ts q_t,      dA_ts = y_t . v_s + e_t
    dS <- exp(P_C) dS + sum_t exp(P_t) q_t y_t,                      dz <- exp(P_C) dz + sum_t exp(P_t) q_t e_t
    da_t = flux + sum_{j >= t in chunk} (q_j dq_j - k_j dk_j)

``flux`` (BK,) is ``sum_v dS S`` at the end of the chunk: what all decays of the chunk together do to later tokens. At
the end of a segment it is taken from the states; chunk by chunk it loses the sum of k dk and gains that of q dq, both
from the state and in fp32 (x, of ``query_grad``), so that rounding of dq never adds up along the sequence.

Pairs inside a chunk are done here where the decay is mild (see ``parts``). Other chunks are noted in ``strong``
(NK, NV, B, H, slots, 2), their tokens [start, end), for ``near_grad``, which adds those pairs.
dq comes with what the state gave; dq, dk, da (NV, B, H, T, K), d_kv (N, H, K, V), d_z (N, H, K).
"""
# mypy: ignore-errors
# ruff: noqa: SIM102 - conditions at compile time stay apart from those at run time

import triton
import triton.language as tl

from linattn.ops.triton.channel_decay.kernels.parts import (
    LIMIT,
    add_product,
    around_middle,
    live_keys,
    load_decay,
    load_rows,
    place,
    product,
    running,
    spread,
    sums_of,
)


@triton.jit(do_not_specialize=["T", "span", "segments", "slots"])
def key_grad_kernel(
    q, k, v, a, d_o, scale, e, mask, table, start_kv, start_z, final_kv, final_z, end_kv, end_z,
    dq, x, dk, da, strong, d_kv, d_z,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, a_b, a_h, a_t, a_d, g_b, g_h, g_t, g_d, m_b, m_t,
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
    dq += part * T * K
    dk += part * T * K
    da += part * T * K
    first_slot = start // C + segment
    x += (part * slots + first_slot) * K
    strong += (((kt * NV + vt) * B * H + bh) * slots + first_slot) * 2
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
        live = r < end - chunk
        keys = live_keys(mask + chunk * m_t, m_t, live, C, MASKED)
        a_c = load_decay(a + chunk * a_t, a_t, a_d, chunk, first, end, ck, K, C, SHIFT)
        q_c = load_rows(q + chunk * q_t, q_t, q_d, live, ck, K, C).to(tl.float32)
        k_c = load_rows(k + chunk * k_t, k_t, k_d, keys, ck, K, C).to(tl.float32)
        v_c = load_rows(v + chunk * v_t, v_t, v_d, keys, cv, V, C).to(DT)
        y = load_rows(d_o + chunk * g_t, g_t, g_d, live, cv, V, C)
        on_k = live[:, None] & (ck < K)[None, :]
        in_k = r[:, None] * K + ck[None, :]
        dq_found = tl.load(dq + chunk * K + in_k, mask=on_k, other=0.0).to(tl.float32)
        e_t = tl.zeros((C,), dtype=tl.float32)
        if NORMALIZED:
            y = y.to(tl.float32) * tl.load(scale + bh * T + chunk + r, mask=live, other=0.0)[:, None]
            e_t = tl.load(e + bh * T + chunk + r, mask=live & (spread(vt, r) == 0), other=0.0)
        y = y.to(DT)
        P, rest, total = running(a_c, C, EXACT)
        kept = tl.exp(total)
        # Through the state.
        writing = tl.exp(rest)
        dk_found = (product(v_c, grad.to(DT), PRECISION) + grad_z[None, :]) * writing
        k_sum = tl.sum(k_c * dk_found, 0)
        reading = q_c * tl.exp(P)
        grad = add_product(grad * kept[None, :], tl.trans(y), reading.to(DT), PRECISION)
        grad_z *= kept
        if NORMALIZED:
            grad_z += tl.sum(reading * e_t[:, None], 0)
        # Pairs of the chunk, unless its decay is too strong for one product.
        mild = False
        if not EXACT:
            mild = tl.min(total) > -LIMIT
            away, back = around_middle(P, total)
            near_q, near_k = (q_c * away).to(DT), (k_c * back).to(DT)
            lower = r[:, None] >= r[None, :]
            dA = product(y, tl.trans(v_c), PRECISION) + e_t[:, None]
            dA = tl.where(lower & keys[None, :], dA, 0.0).to(DT)
            dq_found += product(dA, near_k, PRECISION) * away
            dA_t = product(v_c, tl.trans(y), PRECISION) + e_t[None, :]
            dA_t = tl.where((r[:, None] <= r[None, :]) & keys[:, None], dA_t, 0.0).to(DT)
            dk_found += product(dA_t, near_q, PRECISION) * back
        tl.store(strong + slot * 2, tl.where(mild, -1, chunk))
        tl.store(strong + slot * 2 + 1, tl.minimum(chunk + C, end))
        tl.store(dq + chunk * K + in_k, dq_found.to(dq.dtype.element_ty), mask=on_k)
        tl.store(dk + chunk * K + in_k, tl.where(keys[:, None], dk_found, 0.0).to(dk.dtype.element_ty), mask=on_k)
        # The decay.
        change = q_c * dq_found - k_c * dk_found
        da_found = flux[None, :] + sums_of(r[:, None] <= r[None, :], change, EXACT)
        on_a = on_k
        if SHIFT:
            on_a = on_k & (r > first - chunk)[:, None]
        tl.store(da + (chunk - SHIFT) * K + in_k, da_found.to(da.dtype.element_ty), mask=on_a)
        flux += tl.load(x + slot * K + ck, mask=ck < K, other=0.0) - k_sum
    if SHIFT:
        if at_last & (end > start):  # nobody comes after the last token to be decayed by it
            tl.store(da + (last - 1) * K + ck, tl.zeros((BK,), dtype=da.dtype.element_ty), mask=ck < K)
    if HAS_START:
        if (start == first) & (end > start):
            row = (b + sequence) * H + h
            tl.store(d_kv + row * K * V + cell, grad, mask=in_state)
            tl.store(d_z + row * K + ck, grad_z, mask=(ck < K) & (spread(vt, ck) == 0))
