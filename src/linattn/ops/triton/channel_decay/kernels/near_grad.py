"""Backward, pairs inside chunks whose decay is too strong for one product: by halves, exact (see ``parts``).

One program per (query head, BLOCK chunk slots, K part, V part); most find none and leave. It adds to what the
sweeps wrote: to dv (NK, B, H, T, V) with OF_VALUES, else to dq, dk and da (NV, B, H, T, K), for the chunks that the
sweep of these put into ``strong`` (NK, NV, B, H, slots, 2).
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from linattn.ops.triton.channel_decay.kernels.parts import (
    halves,
    live_keys,
    load_decay,
    load_rows,
    product,
    spread,
    sums_of,
)


@triton.jit(do_not_specialize=["T", "slots"])
def near_grad_kernel(
    q, k, v, a, d_o, scale, e, mask, dq, dk, dv, da, strong,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, a_b, a_h, a_t, a_d, g_b, g_h, g_t, g_d, m_b, m_t,
    B, H, G, T, slots,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, NORMALIZED: tl.constexpr, OF_VALUES: tl.constexpr,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    part = pid % (NK * NV)
    kt, vt = part // NV, part % NV
    blocks = (slots + BLOCK - 1) // BLOCK
    block = (pid // (NK * NV)) % blocks * BLOCK
    bh = pid // (NK * NV * blocks)
    strong += (part * B * H + bh) * slots * 2
    several = block + tl.arange(0, BLOCK)
    starts = tl.load(strong + several * 2, mask=several < slots, other=-1)
    rounds = tl.where(tl.max(starts) >= 0, BLOCK, 0)
    for i in range(0, rounds):
        slot = tl.minimum(block + i, slots - 1)
        start = tl.load(strong + slot * 2)
        if (start >= 0) & (block + i < slots):
            end = tl.load(strong + slot * 2 + 1)
            b, h, hk = bh // H, bh % H, (bh % H) // G
            r, ck, cv = tl.arange(0, C), kt * BK + tl.arange(0, BK), vt * BV + tl.arange(0, BV)
            live = r < end - start
            keys = live_keys(mask + b * m_b + start * m_t, m_t, live, C, MASKED)
            # The first token's decay is not between two tokens of the chunk, whatever it is.
            a_c = load_decay(a + b * a_b + hk * a_h + start * a_t, a_t, a_d, start, start, end, ck, K, C, SHIFT)
            q_c = load_rows(q + b * q_b + h * q_h + start * q_t, q_t, q_d, live, ck, K, C).to(tl.float32)
            k_c = load_rows(k + b * k_b + hk * k_h + start * k_t, k_t, k_d, keys, ck, K, C).to(tl.float32)
            y = load_rows(d_o + b * g_b + h * g_h + start * g_t, g_t, g_d, live, cv, V, C)
            e_t = tl.zeros((C,), dtype=tl.float32)
            if NORMALIZED:
                y = y.to(tl.float32) * tl.load(scale + bh * T + start + r, mask=live, other=0.0)[:, None]
                e_t = tl.load(e + bh * T + start + r, mask=live & (spread(vt, r) == 0), other=0.0)
            y = y.to(DT)
            at_k = ((vt * B * H + bh) * T + start) * K + (r[:, None] * K + ck[None, :])
            at_v = ((kt * B * H + bh) * T + start) * V + (r[:, None] * V + cv[None, :])
            on_keys = keys[:, None] & (ck < K)[None, :]
            on_values = keys[:, None] & (cv < V)[None, :]
            same_token, upper = r[:, None] == r[None, :], r[:, None] <= r[None, :]
            if OF_VALUES:
                A_t = tl.where(same_token, tl.sum(q_c * k_c, 1)[:, None], 0.0)  # key by query
                for level in range(0, LEVELS):
                    later, same, weights = halves(a_c, 1 << level, C, EXACT)
                    near_q = tl.where(later[:, None], q_c * weights, 0.0).to(DT)
                    near_k = tl.where(later[:, None], 0.0, k_c * weights).to(DT)
                    A_t += tl.where(same, product(near_k, tl.trans(near_q), PRECISION), 0.0)
                dv_c = product(A_t.to(DT), y, PRECISION) + tl.load(dv + at_v, mask=on_values, other=0.0).to(tl.float32)
                tl.store(dv + at_v, dv_c.to(dv.dtype.element_ty), mask=on_values)
            else:
                v_c = load_rows(v + b * v_b + hk * v_h + start * v_t, v_t, v_d, keys, cv, V, C).to(DT)
                dA = product(y, tl.trans(v_c), PRECISION) + e_t[:, None]
                dA = tl.where((r[:, None] >= r[None, :]) & keys[None, :], dA, 0.0)
                dA_t = product(v_c, tl.trans(y), PRECISION) + e_t[None, :]
                dA_t = tl.where(upper & keys[:, None], dA_t, 0.0)
                own = tl.sum(tl.where(same_token, dA, 0.0), 1)
                dq_c = own[:, None] * k_c
                dk_c = own[:, None] * q_c
                change = tl.zeros((C, BK), dtype=tl.float32)  # of the potential; between a token and itself is no decay
                for level in range(0, LEVELS):
                    later, same, weights = halves(a_c, 1 << level, C, EXACT)
                    q_w = tl.where(later[:, None], weights, 0.0)
                    k_w = tl.where(later[:, None], 0.0, weights)
                    near_q, near_k = (q_c * q_w).to(DT), (k_c * k_w).to(DT)
                    to_q = product(tl.where(same, dA, 0.0).to(DT), near_k, PRECISION) * q_w
                    to_k = product(tl.where(same, dA_t, 0.0).to(DT), near_q, PRECISION) * k_w
                    dq_c += to_q
                    dk_c += to_k
                    change += q_c * to_q - k_c * to_k
                da_c = sums_of(upper, change, EXACT)
                on_k = live[:, None] & (ck < K)[None, :]
                on_a = on_k & (r > 0)[:, None]  # pairs inside do not see the first token's decay
                dq_c += tl.load(dq + at_k, mask=on_k, other=0.0).to(tl.float32)
                dk_c += tl.load(dk + at_k, mask=on_keys, other=0.0).to(tl.float32)
                da_c += tl.load(da + at_k - SHIFT * K, mask=on_a, other=0.0).to(tl.float32)
                tl.store(dq + at_k, dq_c.to(dq.dtype.element_ty), mask=on_k)
                tl.store(dk + at_k, dk_c.to(dk.dtype.element_ty), mask=on_keys)
                tl.store(da + at_k - SHIFT * K, da_c.to(da.dtype.element_ty), mask=on_a)
