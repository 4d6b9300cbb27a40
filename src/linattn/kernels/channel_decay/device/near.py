"""Forward, pairs inside chunks whose decay is too strong for one product: by halves, exact (see ``decays``).

One program per (query head, BLOCK chunk slots, K part, V part), BN channels at a time; most find none and leave. Few
warps: products then take registers alone, and the transposed ones come out right on Hopper. It adds to the o that
``forward`` wrote (NK, B, H, T, V), divides it, and writes den = den_state + the chunk's row sums (NK, B, H, T).
``strong``: as there.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from linattn.kernels.channel_decay.device.decays import halves, load_decay
from linattn.kernels.channel_decay.device.parts import live_keys, load_rows, on_rows, product, spread, tokens


@triton.jit(do_not_specialize=["T", "slots", "eps"])
def near_kernel(
    q, k, v, a, mask, o, den, den_state, strong,
    q_b, q_h, q_t: tl.constexpr, k_b, k_h, k_t: tl.constexpr, v_b, v_h, v_t: tl.constexpr,
    a_b, a_h, a_t: tl.constexpr, m_b, m_t,
    B, H, G, T, slots, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    BN: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, NORMALIZER: tl.constexpr,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    kt, vt = (pid // NV) % NK, pid % NV
    blocks = (slots + BLOCK - 1) // BLOCK
    block = (pid // (NK * NV)) % blocks * BLOCK
    bh = pid // (NK * NV * blocks)
    part = kt * B * H + bh
    strong += part * slots * 2
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
            A = tl.zeros((C, C), dtype=tl.float32)
            for some in range(0, BK // BN):
                ck = kt * BK + some * BN + tl.arange(0, BN)
                # The first token's decay is not between two tokens of the chunk, whatever it is.
                a_c, _decaying = load_decay(
                    a + b * a_b + hk * a_h + start * a_t, mask + b * m_b + start * m_t, a_t, m_t, start, start,
                    end, ck, K, C, SHIFT, MASKED,
                )  # fmt: skip
                q_c = load_rows(q + b * q_b + h * q_h + start * q_t, q_t, live, ck, K, C).to(tl.float32)
                k_c = load_rows(k + b * k_b + hk * k_h + start * k_t, k_t, keys, ck, K, C).to(tl.float32)
                A += tl.where(r[:, None] == r[None, :], tl.sum(q_c * k_c, 1)[:, None], 0.0)
                for level in range(0, LEVELS):
                    later, same, weights = halves(a_c, 1 << level, C, EXACT)
                    near_q = tl.where(later[:, None], q_c * weights, 0.0).to(DT)
                    near_k = tl.where(later[:, None], 0.0, k_c * weights).to(DT)
                    A += tl.where(same, product(near_q, tl.trans(near_k), PRECISION), 0.0)
            v_c = load_rows(v + b * v_b + hk * v_h + start * v_t, v_t, keys, cv, V, C).to(DT)
            at = o + (part * T + start) * V + (r[:, None] * V + cv[None, :])
            here = on_rows(live, cv, V)
            found = tl.load(at, mask=here, other=0.0).to(tl.float32) + product(A.to(DT), v_c, PRECISION)
            if NORMALIZER > 0:
                n = tl.sum(A, 1) + tl.load(den_state + part * T + start + r, mask=live, other=0.0)
                tl.store(den + part * T + start + r, n, mask=live & (spread(vt, r) == 0))
                if NK == 1:
                    n = n + eps if NORMALIZER == 1 else tl.maximum(tl.abs(n), 1.0)
                    found = found / tl.where(live, n, 1.0)[:, None]
            tl.store(at, found.to(o.dtype.element_ty), mask=here)
