"""Backward, pairs inside chunks whose decay is too strong for one product: by halves, exact (see ``decays``).

One program per (query head, BLOCK chunk slots, K part, V part), BN channels at a time; most find none and leave. Few
warps, as in ``near``. It adds to what the sweeps wrote: to dv (NK, B, H, T, V) with OF_VALUES, else to dq, dk and da
(NV, B, H, T, K), for the chunks that the sweep of these put into ``strong`` (NK, NV, B, H, slots, 2).
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from linattn.kernels.channel_decay.device.decays import halves, load_decay, sums_of
from linattn.kernels.channel_decay.device.parts import (
    as_rounded,
    live_keys,
    load_rows,
    on_rows,
    product,
    spread,
    tokens,
)


@triton.jit(do_not_specialize=["T", "slots"])
def near_grad_kernel(
    q, k, v, a, d_o, scale, e, mask, dq, dk, dv, da, strong,
    q_b, q_h, q_t: tl.constexpr, k_b, k_h, k_t: tl.constexpr, v_b, v_h, v_t: tl.constexpr,
    a_b, a_h, a_t: tl.constexpr, g_b, g_h, g_t: tl.constexpr, m_b, m_t,
    B, H, G, T, slots,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    BN: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
    NORMALIZED: tl.constexpr, OF_VALUES: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
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
            r, cv = tl.arange(0, C), vt * BV + tl.arange(0, BV)
            live = tokens(end, start, C)
            keys = live_keys(mask + b * m_b + start * m_t, m_t, live, C, MASKED)
            y = load_rows(d_o + b * g_b + h * g_h + start * g_t, g_t, live, cv, V, C)
            e_t = tl.zeros((C,), dtype=tl.float32)
            if NORMALIZED:
                y = y.to(tl.float32) * tl.load(scale + bh * T + start + r, mask=live, other=0.0)[:, None]
                e_t = tl.load(e + bh * T + start + r, mask=live & (spread(vt, r) == 0), other=0.0)
            y = y.to(DT)
            same_token, upper = r[:, None] == r[None, :], r[:, None] <= r[None, :]
            A_t = tl.zeros((C, C), dtype=tl.float32)  # key by query
            if not OF_VALUES:
                v_c = load_rows(v + b * v_b + hk * v_h + start * v_t, v_t, keys, cv, V, C).to(DT)
                dA = product(y, tl.trans(v_c), PRECISION) + e_t[:, None]
                dA = tl.where((r[:, None] >= r[None, :]) & keys[None, :], dA, 0.0)
                dA_t = product(v_c, tl.trans(y), PRECISION) + e_t[None, :]
                dA_t = tl.where(upper & keys[:, None], dA_t, 0.0)
                own = tl.sum(tl.where(same_token, dA, 0.0), 1)
            for some in range(0, BK // BN):
                ck = kt * BK + some * BN + tl.arange(0, BN)
                # The first token's decay is not between two tokens of the chunk, whatever it is.
                a_c, decaying = load_decay(
                    a + b * a_b + hk * a_h + start * a_t, mask + b * m_b + start * m_t, a_t, m_t, start, start,
                    end, ck, K, C, SHIFT, MASKED,
                )  # fmt: skip
                q_c = load_rows(q + b * q_b + h * q_h + start * q_t, q_t, live, ck, K, C).to(tl.float32)
                k_c = load_rows(k + b * k_b + hk * k_h + start * k_t, k_t, keys, ck, K, C).to(tl.float32)
                if OF_VALUES:
                    A_t += tl.where(same_token, tl.sum(q_c * k_c, 1)[:, None], 0.0)
                    for level in range(0, LEVELS):
                        later, same, weights = halves(a_c, 1 << level, C, EXACT)
                        near_q = tl.where(later[:, None], q_c * weights, 0.0).to(DT)
                        near_k = tl.where(later[:, None], 0.0, k_c * weights).to(DT)
                        A_t += tl.where(same, product(near_k, tl.trans(near_q), PRECISION), 0.0)
                else:
                    dq_c = own[:, None] * k_c
                    dk_c = own[:, None] * q_c
                    # Of the potential; between a token and itself is no decay.
                    change = tl.zeros((C, BN), dtype=tl.float32)
                    for level in range(0, LEVELS):
                        later, same, weights = halves(a_c, 1 << level, C, EXACT)
                        q_w = tl.where(later[:, None], weights, 0.0)
                        k_w = tl.where(later[:, None], 0.0, weights)
                        near_q = as_rounded(q_c * q_w, DT, PRECISION)
                        near_k = as_rounded(k_c * k_w, DT, PRECISION)
                        to_q = product(tl.where(same, dA, 0.0).to(DT), near_k.to(DT), PRECISION)
                        to_k = product(tl.where(same, dA_t, 0.0).to(DT), near_q.to(DT), PRECISION)
                        dq_c += to_q * q_w
                        dk_c += to_k * k_w
                        change += near_q * to_q - near_k * to_k
                    da_c = sums_of(tl.where(upper, 1.0, 0.0), change, EXACT)
                    at_k = ((vt * B * H + bh) * T + start) * K + (r[:, None] * K + ck[None, :])
                    on_keys = on_rows(keys, ck, K)
                    on_k = on_rows(live, ck, K)
                    # Pairs inside do not see the first token's decay.
                    on_a = on_k & ((r > 0) & decaying)[:, None]
                    dq_c += tl.load(dq + at_k, mask=on_k, other=0.0).to(tl.float32)
                    dk_c += tl.load(dk + at_k, mask=on_keys, other=0.0).to(tl.float32)
                    da_c += tl.load(da + at_k - SHIFT * K, mask=on_a, other=0.0)
                    tl.store(dq + at_k, dq_c.to(dq.dtype.element_ty), mask=on_k)
                    tl.store(dk + at_k, dk_c.to(dk.dtype.element_ty), mask=on_keys)
                    tl.store(da + at_k - SHIFT * K, da_c, mask=on_a)
            if OF_VALUES:
                at_v = ((kt * B * H + bh) * T + start) * V + (r[:, None] * V + cv[None, :])
                on_values = on_rows(keys, cv, V)
                dv_c = product(A_t.to(DT), y, PRECISION) + tl.load(dv + at_v, mask=on_values, other=0.0).to(tl.float32)
                tl.store(dv + at_v, dv_c.to(dv.dtype.element_ty), mask=on_values)
