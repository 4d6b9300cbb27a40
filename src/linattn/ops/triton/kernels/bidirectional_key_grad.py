# mypy: ignore-errors
"""dpsi_s = dS v_s + dz and dv_s = dS^T psi_s for the keys of one segment: for long sequences.

k (B, H_kv, T, K), v (B, H_kv, T, V) strided; d_state (N, H_kv, K V + K) contiguous fp32; mask (B, T) uint8;
dk, dv contiguous. Grid: N H_kv segments.
"""

import triton
import triton.language as tl

from linattn.ops.triton.kernels.bidirectional_common import (
    as_operand,
    load_rows,
    load_state,
    load_state_keys,
    remainder,
    segment_of,
    store_columns,
    store_rows,
    times_wide,
    visible,
)


@triton.jit(do_not_specialize=["T", "H_kv", "segments"])
def bidirectional_key_grad(
    k, v, d_state, mask, cu_seqlens, dk, dv,
    k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, mask_b, mask_t, H_kv, T, segments,
    HAS_MASK: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = k.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = k.dtype.element_ty == tl.float32
    pid = tl.program_id(0)
    segment, row = pid % segments, (pid // segments).to(tl.int64)
    n, h = row // H_kv, row % H_kv
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    d_state += row * (K * V + K)
    dS = load_state(d_state, K, V, BK, BV)
    dz = load_state_keys(d_state, K, V, BK)
    high, low = as_operand(dS, BF16), remainder(dS, BF16)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    mask += b * mask_b
    dk += (b * H_kv + h) * T * K
    dv += (b * H_kv + h) * T * V
    for t in range(first, end, BT):
        keep = visible(mask, t, end, mask_t, HAS_MASK, BT)
        exists = t + tl.arange(0, BT) < end
        keys = load_rows(k, t, keep, k_t, k_d, K, BT, BK)
        values = load_rows(v, t, keep, v_t, v_d, V, BT, BV)
        values_t = tl.trans(values)
        d_keys = times_wide(high, values_t, tl.zeros((BK, BT), tl.float32), IEEE)
        d_values = times_wide(keys, high, tl.zeros((BT, BV), tl.float32), IEEE)
        if SPLIT and BF16:
            d_keys = times_wide(low, values_t, d_keys, IEEE)
            d_values = times_wide(keys, low, d_values, IEEE)
        d_keys += dz[:, None]
        if HAS_MASK:
            d_keys = tl.where(keep[None, :], d_keys, 0.0)
        store_columns(dk, t, exists, K, d_keys, K, BT, BK)
        store_rows(dv, t, exists, V, d_values, V, BT, BV)
