# mypy: ignore-errors
"""One token of exponential attention: each number of the state is read once and written once.

    m' = max(m + f, i)                                   the unit of the new state is e^{m'}, m' as fp32 holds it
    C' = e^{m + f - m'} C + e^{i - m'} k v^T,            n' likewise with 1 for v
    o  = U q C' / max(|U q . n'|, 1),  U = scale e^{m'}  which is q C' / max(|q . n'|, e^{-m'} / scale)

Names and shapes, beside those of ``step.kernels.step``; H = H_kv G. All inputs are read through strides, all results
are contiguous and lie apart from the inputs: programs of one head read the same n and m, which the first one writes.

    log_input, log_decay   (B, H_kv), i and f in any dtype
    kv, z, unit            (B, H_kv, K, V) and (B, H_kv, K), fp32, and (B, H_kv) in any dtype: C, n and m
    next_kv ...            the same after the token, fp32

A program computes a few numbers from the gates, in fp64, because their differences matter for the digits of e^x. The
unit is rounded before the sums are put into it, so that the sums absorb the rounding error. Keys and queries with
their factors are fp32: rounded again, one token could spoil a denominator that is a small difference.
"""

import triton
import triton.language as tl

from linattn.kernels.exponential.device.units import exp_of
from linattn.kernels.step.device.columns import place, write_and_read


@triton.jit(do_not_specialize=["scale"])
def exponential_step(
    q, k, v, log_input, log_decay, kv, z, unit, out, next_kv, next_z, next_unit,
    scale, H_kv, G,
    q_b, q_h, q_d, k_b, k_h, k_d, v_b, v_h, v_d, i_b, i_h, f_b, f_h,
    kv_b, kv_h, kv_d, kv_e, z_b, z_h, z_d, m_b, m_h,
    K: tl.constexpr, V: tl.constexpr, HAS_STATE: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,  # of m' in U
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    b, h, row, part, d, d_ok = place(H_kv, K, BLOCK_K, PROGRAMS)
    gain = tl.load(log_input + b * i_b + h * i_h).to(tl.float64)
    best = gain
    if HAS_STATE:
        kept = tl.load(unit + b * m_b + h * m_h).to(tl.float64) + tl.load(log_decay + b * f_b + h * f_h).to(tl.float64)
        best = tl.maximum(kept, gain, propagate_nan=tl.PropagateNan.ALL)
    rounded = best.to(tl.float32)
    m = rounded.to(tl.float64)
    in_queries = exp_of(tl.where(m < LEAST, LEAST, tl.where(m > MOST, MOST, m))) * scale
    m = tl.where(m == float("-inf"), 0.0, m)  # nothing came yet

    in_key = tl.where(best == best, exp_of(gain - m), float("nan"))  # of NaN exp_of would make 0
    key = tl.load(k + b * k_b + h * k_h + d * k_d, mask=d_ok, other=0).to(tl.float32) * in_key
    lam = tl.full([BLOCK_K], 1.0, tl.float32)
    z_new = key
    if HAS_STATE:
        lam *= exp_of(kept - m)
        z_new = lam * tl.load(z + b * z_b + h * z_h + d * z_d, mask=d_ok, other=0) + key
    write_and_read(
        q + b * q_b, key, v + b * v_b + h * v_h, lam, in_queries, kv + b * kv_b + h * kv_h, z_new, out + row * G * V,
        next_kv + row * (K * V), 0.0, h * G, G, part, q_h, q_d, v_d, kv_d, kv_e, V, 1,
        K, V, NORM=2, HAS_STATE=HAS_STATE, HAS_DECAY=True, KEY_INDEX=False, IN_PLACE=False,
        BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, TILES=1,
    )  # fmt: skip
    tl.store(next_z + row * K + d, z_new, mask=d_ok & (part + tl.zeros_like(d) == 0))
    tl.store(next_unit + row, rounded, mask=part == 0)
