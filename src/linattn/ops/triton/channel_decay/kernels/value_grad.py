"""Backward, against the sequence: dv.

One program per (query head, segment, K part, V part) walks its chunks from the last, with the gradient of the state
after the chunk (BK, BV) in registers:

    dv_s = exp(P_C - P_s) k_s dS + sum_{t in chunk} A_ts y_t,      dS <- exp(P_C) dS + sum_t exp(P_t) q_t y_t

Names and shapes as in ``key_grad``; dv (NK, B, H, T, V). Chunks that are not mild are noted in ``strong``
(NK, NV, B, H, slots, 2), as there.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from linattn.ops.triton.channel_decay.kernels.parts import (
    LIMIT,
    add_product,
    around_middle,
    live_keys,
    load_columns,
    load_decay,
    load_decay_columns,
    load_rows,
    place,
    product,
    running,
    running_columns,
    spread,
)


@triton.jit(do_not_specialize=["T", "span", "segments", "slots"])
def value_grad_kernel(
    q, k, a, d_o, scale, mask, table, end_kv, dv, strong,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, a_b, a_h, a_t, a_d, g_b, g_h, g_t, g_d, m_b, m_t,
    B, H, G, T, span, segments, slots,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    C: tl.constexpr, NORMALIZED: tl.constexpr,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, SEGMENTED: tl.constexpr,
    HAS_END: tl.constexpr, EXACT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    kt, vt = (pid // NV) % NK, pid % NV
    segment = (pid // (NK * NV)) % segments
    bh = pid // (NK * NV * segments)
    b, h, hk = bh // H, bh % H, (bh % H) // G
    start, end, sequence, first, _ = place(table, b, segment, T, span, PACKED)
    r, ck, cv = tl.arange(0, C), (kt * BK).to(tl.int32) + tl.arange(0, BK), (vt * BV).to(tl.int32) + tl.arange(0, BV)
    q += b * q_b + h * q_h
    k += b * k_b + hk * k_h
    a += b * a_b + hk * a_h
    d_o += b * g_b + h * g_h
    mask += b * m_b
    dv += (kt * B * H + bh) * T * V
    strong += (((kt * NV + vt) * B * H + bh) * slots + start // C + segment) * 2
    grad = tl.zeros((BK, BV), dtype=tl.float32)
    in_state = (ck < K)[:, None] & (cv < V)[None, :]
    cell = ck[:, None] * V + cv[None, :]
    if SEGMENTED:
        grad = tl.load(end_kv + (bh * segments + segment) * K * V + cell, mask=in_state, other=0.0)
    elif HAS_END:
        row = (b + sequence) * (H // G) + hk
        own = spread(h % G, ck) == 0  # the state's gradient goes to the first head of a group
        grad = tl.load(end_kv + row * K * V + cell, mask=in_state & own[:, None], other=0.0)
    chunks = (end - start + C - 1) // C
    for i in range(0, chunks):
        slot = chunks - 1 - i
        chunk = start + slot * C
        live = r < end - chunk
        keys = live_keys(mask + chunk * m_t, m_t, live, C, MASKED)
        a_c = load_decay(a + chunk * a_t, a_t, a_d, chunk, first, end, ck, K, C, SHIFT)
        a_columns = load_decay_columns(a + chunk * a_t, a_t, a_d, chunk, first, end, ck, K, C, SHIFT)
        q_columns = load_columns(q + chunk * q_t, q_t, q_d, live, ck, K, C).to(tl.float32)
        k_c = load_rows(k + chunk * k_t, k_t, k_d, keys, ck, K, C).to(tl.float32)
        y = load_rows(d_o + chunk * g_t, g_t, g_d, live, cv, V, C)
        if NORMALIZED:
            y = y.to(tl.float32) * tl.load(scale + bh * T + chunk + r, mask=live, other=0.0)[:, None]
        y = y.to(DT)
        P, rest, total = running(a_c, C, EXACT)
        P_columns, _rest_columns = running_columns(a_columns, total, C, EXACT)
        found = product((k_c * tl.exp(rest)).to(DT), grad.to(DT), PRECISION)
        mild = False
        if not EXACT:
            mild = tl.min(total) > -LIMIT
            _own_away, back = around_middle(P, total)
            away = tl.where(
                (spread(tl.min(total), total) > -LIMIT)[:, None], tl.exp(P_columns - 0.5 * total[:, None]), 0.0
            )
            A_t = product((k_c * back).to(DT), (q_columns * away).to(DT), PRECISION)  # key by query
            A_t = tl.where(r[:, None] <= r[None, :], A_t, 0.0)
            found = add_product(found, A_t.to(DT), y, PRECISION)
        grad = add_product(grad * tl.exp(total)[:, None], (q_columns * tl.exp(P_columns)).to(DT), y, PRECISION)
        found = tl.where(keys[:, None], found, 0.0).to(dv.dtype.element_ty)
        here = live[:, None] & (cv < V)[None, :]
        tl.store(dv + chunk * V + (r[:, None] * V + cv[None, :]), found, mask=here)
        tl.store(strong + slot * 2, tl.where(mild, -1, chunk))
        tl.store(strong + slot * 2 + 1, tl.minimum(chunk + C, end))
