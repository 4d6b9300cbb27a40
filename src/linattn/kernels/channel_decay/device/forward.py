"""Forward: one program per (query head, segment, K part, V part) walks its chunks with the state in registers.

    o_t = [2^P_t q_t S + sum_{s in chunk} A_ts v_s] / n_t,     S <- 2^P_C S + sum_s 2^(P_C - P_s) k_s v_s

q (B, H, T, K), k and a (B, H_kv, T, K), v (B, H_kv, T, V), all strided; mask (B, T); table: see ``parts.place``;
start states kv (R, K, V), z (R, K) by segment (SEGMENTED) or sequence; o (NK, B, H, T, V), den (NK, B, H, T) and the
final states (N, H_kv, K, V), (N, H_kv, K) contiguous. With several K parts o holds sums that are yet to be divided.

Chunks whose decay is not mild (see ``decays``) get what the state gives, undivided, and ``strong`` (NK, B, H, slots, 2)
notes their tokens [start, end) for ``near``, with the row sums so far in ``den_state``, shaped like den.
"""
# mypy: ignore-errors
# ruff: noqa: SIM102 - conditions at compile time stay apart from those at run time

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
    as_rounded,
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


@triton.jit(do_not_specialize=["T", "span", "segments", "slots", "eps"])
def forward_kernel(
    q, k, v, a, mask, table, start_kv, start_z, o, den, den_state, strong, final_kv, final_z,
    q_b, q_h, q_t: tl.constexpr, k_b, k_h, k_t: tl.constexpr, v_b, v_h, v_t: tl.constexpr,
    a_b, a_h, a_t: tl.constexpr, m_b, m_t,
    B, H, G, T, span, segments, slots, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    C: tl.constexpr,
    NORMALIZER: tl.constexpr,  # 0 none, 1 sum, 2 max(abs, 1)
    SHIFT: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, SEGMENTED: tl.constexpr,
    HAS_START: tl.constexpr, HAS_FINAL: tl.constexpr,
    EXACT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    kt, vt = (pid // NV) % NK, pid % NV
    segment = (pid // (NK * NV)) % segments
    bh = pid // (NK * NV * segments)
    b, h, hk = bh // H, bh % H, (bh % H) // G
    start, end, sequence, first, last = place(table, b, segment, T, span, PACKED)
    r, dk, dv = tl.arange(0, C), (kt * BK).to(tl.int32) + tl.arange(0, BK), (vt * BV).to(tl.int32) + tl.arange(0, BV)
    q += b * q_b + h * q_h
    k += b * k_b + hk * k_h
    v += b * v_b + hk * v_h
    a += b * a_b + hk * a_h
    mask += b * m_b
    o += (kt * B * H + bh) * T * V
    den += (kt * B * H + bh) * T
    den_state += (kt * B * H + bh) * T
    strong += ((kt * B * H + bh) * slots + start // C + segment) * 2
    state_row = (b + sequence) * (H // G) + hk
    in_state = (dk < K)[:, None] & (dv < V)[None, :]
    if HAS_START:
        row = state_row
        if SEGMENTED:
            row = (b * (H // G) + hk) * segments + segment
        state = tl.load(start_kv + row * K * V + dk[:, None] * V + dv[None, :], mask=in_state, other=0.0)
        z = tl.load(start_z + row * K + dk, mask=dk < K, other=0.0)
    else:
        state = tl.zeros((BK, BV), dtype=tl.float32)
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
        a_c, _decaying = load_decay(
            a + chunk * a_t, mask + chunk * m_t, a_t, m_t, chunk, first, end, dk, K, C, SHIFT, MASKED
        )
        a_c = rounded(a_c, EXACT, DT)
        k_columns = load_columns(k + chunk * k_t, k_t, keys, dk, K, C)
        P, early, late, weakest = running_columns(a_c, C, EXACT)
        seen, more, after = passage(early, late, weakest, EXACT)
        # The state first: what it needs is then out of the registers.
        brought, z_before = state * seen[:, None], z * seen
        before = brought.to(DT)
        of_keys = factor_columns(P, a_c, early, late, weakest, C, True, EXACT)
        writing = k_columns.to(tl.float32) * power(of_keys)
        v_c = load_rows(v + chunk * v_t, v_t, keys, dv, V, C).to(DT)
        if (NORMALIZER > 0) | HAS_FINAL:
            writing = as_rounded(writing, DT, PRECISION)
            z = (z_before * more + tl.sum(writing, 1)) * after
        writing = writing.to(DT)
        state = add_product(brought * more[:, None], writing, v_c, PRECISION) * after[:, None]
        q_c = load_rows(q + chunk * q_t, q_t, live, dk, K, C)
        of_queries, _of_keys = factors(a_c, early, late, weakest, C, EXACT)
        reading = q_c.to(tl.float32) * power(of_queries)
        found = product(reading.to(DT), before, PRECISION)
        if NORMALIZER > 0:
            n = tl.sum(reading * z_before[None, :], 1)
        mild = False
        if not EXACT:
            mild = weakest > -LIMIT
            A = product(reading.to(DT), writing, PRECISION)
            A = tl.where((r[:, None] >= r[None, :]) & (spread(weakest, A) > -LIMIT), A, 0.0)
            found = add_product(found, A.to(DT), v_c, PRECISION)
            if NORMALIZER > 0:
                n += tl.sum(A, 1)
        if NORMALIZER > 0:
            here = live & (spread(vt, r) == 0)
            if mild:
                tl.store(den + chunk + r, n, mask=here)
            else:
                tl.store(den_state + chunk + r, n, mask=here)
            if NK == 1:
                n = n + eps if NORMALIZER == 1 else tl.maximum(tl.abs(n), 1.0)
                found = found / tl.where(spread(mild, r) != 0, n, 1.0)[:, None]
        on_v = on_rows(live, dv, V)
        tl.store(o + chunk * V + offsets(dv, V, C), found.to(o.dtype.element_ty), mask=on_v)
        tl.store(strong, tl.where(mild, -1, chunk))
        tl.store(strong + 1, tl.minimum(chunk + C, end))
        strong += 2
    if HAS_FINAL:
        if (end == last) & (end > start) & (h % G == 0):
            tl.store(final_kv + state_row * K * V + dk[:, None] * V + dv[None, :], state, mask=in_state)
            tl.store(final_z + state_row * K + dk, z, mask=(dk < K) & (spread(vt, dk) == 0))
