"""Backward, against the sequence: dv.

One program per (query head, segment, K part, V part) walks its chunks from the last, with the gradient of the state
after the chunk (BK, BV) in registers:

    dv_s = 2^(P_C - P_s) k_s dS + sum_{t in chunk} A_ts y_t,      dS <- 2^P_C dS + sum_t 2^P_t q_t y_t

Names and shapes as in ``key_grad``; dv (NK, B, H, T, V). Chunks that are not mild are noted in ``strong``
(NK, NV, B, H, slots, 2), as there.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from linattn.kernels.channel_decay.device.decays import (
    LIMIT,
    decay_row,
    factor_columns,
    factors,
    load_decay,
    passage,
    power,
    rounded,
    running_columns,
)
from linattn.kernels.channel_decay.device.parts import (
    add_product,
    fetch,
    live_keys,
    load_columns,
    load_rows,
    offsets,
    on_rows,
    place,
    product,
    spread,
    tokens,
)


@triton.jit(do_not_specialize=["T", "span", "segments", "slots"])
def value_grad_kernel(
    q, k, a, d_o, scale, mask, table, end_kv, dv, strong,
    q_b, q_h, q_t: tl.constexpr, k_b, k_h, k_t: tl.constexpr, a_b, a_h, a_t: tl.constexpr,
    g_b, g_h, g_t: tl.constexpr, m_b, m_t,
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
        live = tokens(end, chunk, C)
        keys = live_keys(mask + chunk * m_t, m_t, live, C, MASKED)
        following = tl.maximum(chunk - C, start)
        fetch(a + decay_row(following, first, SHIFT) * a_t, a_t, end - following, kt * BK, BK, C)
        fetch(k + following * k_t, k_t, end - following, kt * BK, BK, C)
        fetch(q + following * q_t, q_t, end - following, kt * BK, BK, C)
        fetch(d_o + following * g_t, g_t, end - following, vt * BV, BV, C)
        a_c, _decaying = load_decay(
            a + chunk * a_t, mask + chunk * m_t, a_t, m_t, chunk, first, end, ck, K, C, SHIFT, MASKED
        )
        a_c = rounded(a_c, EXACT, DT)
        q_columns = load_columns(q + chunk * q_t, q_t, live, ck, K, C)
        P, early, late, weakest = running_columns(a_c, C, EXACT)
        seen, more, after = passage(late, early, weakest, EXACT)
        brought = grad * seen[:, None]
        before = brought.to(DT)
        of_queries = factor_columns(P, a_c, early, late, weakest, C, False, EXACT)
        reading = (q_columns.to(tl.float32) * power(of_queries)).to(DT)
        y = load_rows(d_o + chunk * g_t, g_t, live, cv, V, C)
        if NORMALIZED:
            y = y.to(tl.float32) * tl.load(scale + bh * T + chunk + r, mask=live, other=0.0)[:, None]
        y = y.to(DT)
        grad = add_product(brought * more[:, None], reading, y, PRECISION) * after[:, None]
        k_c = load_rows(k + chunk * k_t, k_t, keys, ck, K, C)
        _of_queries, of_keys = factors(a_c, early, late, weakest, C, EXACT)
        writing = (k_c.to(tl.float32) * power(of_keys)).to(DT)
        found = product(writing, before, PRECISION)
        mild = False
        if not EXACT:
            mild = weakest > -LIMIT
            A_t = product(writing, reading, PRECISION)  # key by query
            A_t = tl.where((r[:, None] <= r[None, :]) & (spread(weakest, A_t) > -LIMIT), A_t, 0.0)
            found = add_product(found, A_t.to(DT), y, PRECISION)
        if MASKED:
            found = tl.where(keys[:, None], found, 0.0)
        found = found.to(dv.dtype.element_ty)
        here = on_rows(live, cv, V)
        tl.store(dv + chunk * V + offsets(cv, V, C), found, mask=here)
        tl.store(strong + slot * 2, tl.where(mild, -1, chunk))
        tl.store(strong + slot * 2 + 1, tl.minimum(chunk + C, end))
