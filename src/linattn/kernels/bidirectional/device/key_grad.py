# mypy: ignore-errors
"""dpsi_s = dS v_s + dz and dv_s = dS^T psi_s for the keys of one segment: for long sequences.

k (B, H_kv, T, D), v (B, H_kv, T, FLOWS V) strided; d_state (N, H_kv FLOWS, K V + K) contiguous fp32; mask (B, T) uint8;
dk (FLOWS, B, H_kv, T, D), dv (B, H_kv, T, FLOWS V), see memory. Grid: N H_kv FLOWS segments.
With a map, parts to be summed: d_table (segments, N, H_kv FLOWS, 2, F), d_token (FLOWS, B, H_kv, T), d_constant
(segments, N, H_kv FLOWS), contiguous fp32. Features: see features.
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import as_operand, remainder
from linattn.kernels.bidirectional.device.features import head_of
from linattn.kernels.bidirectional.device.key_walk import walk_keys
from linattn.kernels.bidirectional.device.memory import head_start, load_state_as, load_vector, segment_of


@triton.jit(do_not_specialize=["T", "N", "B", "H_kv", "segments"])
def bidirectional_key_grad(
    k, v, d_state, mask, cu_seqlens, dk, dv, table_k, token_k, constant_k, d_table_k, d_token_k, d_constant_k,
    k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, mask_b, mask_t,
    table_k_b, table_k_h, table_k_f, token_k_b, token_k_h, token_k_t, N, B, H_kv, T, segments,
    HAS_MASK: tl.constexpr, PACKED: tl.constexpr, MAP_K: tl.constexpr, TOKEN_K: tl.constexpr, LEARN_K: tl.constexpr,
    CONSTANT: tl.constexpr, FLOWS: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, BY_TOKEN_K: tl.constexpr,
    BY_TOKEN_V: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = k.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = k.dtype.element_ty == tl.float32
    F: tl.constexpr = K - CONSTANT
    P: tl.constexpr = F // PARTS
    TURNED: tl.constexpr = MAP_K >= 0
    pid = tl.program_id(0)
    segment, row = pid % segments, (pid // segments).to(tl.int64)
    n, h, f = head_of(row, H_kv, FLOWS)
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    d_state += row * (K * V + K)
    dS = load_state_as(d_state, TURNED, P, V, BK, BV)
    dz = load_vector(d_state + K * V, P, BK)
    high, low = as_operand(dS, BF16, IEEE), remainder(dS, BF16, IEEE)
    high2, low2, dz2 = high, low, dz
    if PARTS == 2:
        dS2 = load_state_as(d_state + P * V, TURNED, P, V, BK, BV)
        dz2 = load_vector(d_state + K * V + P, P, BK)
        high2, low2 = as_operand(dS2, BF16, IEEE), remainder(dS2, BF16, IEEE)
    place = segment.to(tl.int64) * N * H_kv * FLOWS + row
    head = (f * B + b) * H_kv + h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h + f * V * v_d
    mask += b * mask_b
    table_k += b * table_k_b + h * table_k_h + f * table_k_f
    token_k += b * token_k_b + h * token_k_h
    dk += head_start(head, f * B + b, H_kv, T, D, BY_TOKEN_K)
    dv += head_start(b * H_kv + h, b, H_kv, T, FLOWS * V, BY_TOKEN_V) + f * V
    dk_t = H_kv * D if BY_TOKEN_K else D
    dv_t = H_kv * FLOWS * V if BY_TOKEN_V else FLOWS * V
    d_token_k += head * T
    d_table_k += place * 2 * F
    c_k, d_row, d_count = 0.0, tl.zeros((BV,), tl.float32), 0.0
    if CONSTANT:
        c_k, d_row, d_count = tl.load(constant_k), load_vector(d_state + F * V, V, BV), tl.load(d_state + K * V + F)
    d_c = walk_keys(
        k, v, mask, dk, dv, table_k, token_k, d_table_k, d_token_k, (high, low, high2, low2, dz, dz2),
        (c_k, d_row, d_count), k_t, k_d, v_t, v_d, dk_t, dv_t, mask_t, token_k_t, first, end,
        HAS_MASK, MAP_K, TOKEN_K, LEARN_K, CONSTANT, PARTS, TURNED, SPLIT, D, V, BT, BK, BV,
    )  # fmt: skip
    if CONSTANT:
        tl.store(d_constant_k + place, d_c)
