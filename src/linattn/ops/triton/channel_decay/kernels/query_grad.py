"""Backward, along the sequence: what queries get from the state before their chunk, and a sum of it for the decay.

    dq_t = exp(P_t) (S y_t + z e_t),     x = sum_{t in chunk} q_t dq_t

One program per (query head, segment, K part, V part), with the state transposed (BV, BK) in registers, computed anew.
y = d_o / n, e = the denominator's gradient. dq (NV, B, H, T, K), x (NV, B, H, slots, K) fp32; slots count chunks,
those of a segment from ``start // C + segment`` on.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from linattn.ops.triton.channel_decay.kernels.parts import (
    add_product,
    live_keys,
    load_decay,
    load_rows,
    place,
    product,
    running,
    spread,
)


@triton.jit(do_not_specialize=["T", "span", "segments", "slots"])
def query_grad_kernel(
    q, k, v, a, d_o, scale, e, mask, table, start_kv, start_z, dq, x,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, a_b, a_h, a_t, a_d, g_b, g_h, g_t, g_d, m_b, m_t,
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
    x += ((vt * B * H + bh) * slots + start // C + segment) * K
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
        live = r < end - chunk
        keys = live_keys(mask + chunk * m_t, m_t, live, C, MASKED)
        a_c = load_decay(a + chunk * a_t, a_t, a_d, chunk, first, end, dk, K, C, SHIFT)
        q_c = load_rows(q + chunk * q_t, q_t, q_d, live, dk, K, C).to(tl.float32)
        k_c = load_rows(k + chunk * k_t, k_t, k_d, keys, dk, K, C).to(tl.float32)
        v_c = load_rows(v + chunk * v_t, v_t, v_d, keys, dv, V, C).to(DT)
        y = load_rows(d_o + chunk * g_t, g_t, g_d, live, dv, V, C)
        P, rest, total = running(a_c, C, EXACT)
        if NORMALIZED:
            y = y.to(tl.float32) * tl.load(scale + bh * T + chunk + r, mask=live, other=0.0)[:, None]
        found = product(y.to(DT), state.to(DT), PRECISION)
        writing = k_c * tl.exp(rest)
        kept = tl.exp(total)
        if NORMALIZED:
            e_t = tl.load(e + bh * T + chunk + r, mask=live & (spread(vt, r) == 0), other=0.0)
            found += e_t[:, None] * z[None, :]
            z = z * kept + tl.sum(writing, 0)
        found *= tl.exp(P)
        state = add_product(state * kept[None, :], tl.trans(v_c), writing.to(DT), PRECISION)
        here = live[:, None] & (dk < K)[None, :]
        tl.store(dq + chunk * K + (r[:, None] * K + dk[None, :]), found.to(dq.dtype.element_ty), mask=here)
        tl.store(x + dk, tl.sum(q_c * found, 0), mask=dk < K)
        x += K
