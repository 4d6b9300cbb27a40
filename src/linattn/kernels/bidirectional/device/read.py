# mypy: ignore-errors
"""o_t = phi_t S / n_t for the queries of one segment, from a state in memory: for long sequences.

q (B, G H_kv, T, D) strided; state (N, H_kv FLOWS, K V + K) contiguous fp32; o (B, G H_kv, T, FLOWS V), see memory.
Grid: N H_kv FLOWS segments, times tiles of V: a program holds S (BK, BV) while it walks the queries of its group.
Features: see features.
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import as_operand, pair, remainder
from linattn.kernels.bidirectional.device.features import head_of
from linattn.kernels.bidirectional.device.memory import head_start, load_vector, segment_of
from linattn.kernels.bidirectional.device.read_walk import answer_queries


@triton.jit(do_not_specialize=["T", "H_kv", "G", "segments", "eps"])
def bidirectional_read(
    q, state, o, cu_seqlens, table_q, token_q, constant_q, q_b, q_h, q_t, q_d,
    table_q_b, table_q_h, table_q_g, table_q_f, token_q_b, token_q_h, token_q_g, token_q_t,
    H_kv, G, T, segments, eps,
    NORM: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr, MAP_Q: tl.constexpr, TOKEN_Q: tl.constexpr,
    CONSTANT: tl.constexpr, FLOWS: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, BY_TOKEN: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    BF16: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    F: tl.constexpr = K - CONSTANT
    P: tl.constexpr = F // PARTS
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    tile_v, rest = pid % TILES, pid // TILES
    segment, row = rest % segments, (rest // segments).to(tl.int64)
    n, h, f = head_of(row, H_kv, FLOWS)
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    state += row * (K * V + K)
    feature, column = tl.arange(0, BK), tile_v * BV + tl.arange(0, BV)
    inside = (feature < P)[:, None] & (column < V)[None, :]
    S = tl.load(state + feature[:, None] * V + column[None, :], mask=inside, other=0.0)
    z = load_vector(state + K * V, P, BK)
    high, low, zs = as_operand(S, BF16, IEEE), remainder(S, BF16, IEEE), pair(z, BF16, IEEE)
    high2, low2, z2 = high, low, z
    if PARTS == 2:
        S2 = tl.load(state + P * V + feature[:, None] * V + column[None, :], mask=inside, other=0.0)
        z2 = load_vector(state + K * V + P, P, BK)
        high2, low2 = as_operand(S2, BF16, IEEE), remainder(S2, BF16, IEEE)
    last, z_last = z, 0.0
    if CONSTANT:
        c_q = tl.load(constant_q)
        last = c_q * tl.load(state + F * V + column, mask=column < V, other=0.0)
        z_last = c_q * tl.load(state + K * V + F)
    q += b * q_b + h * G * q_h
    o += head_start((b * H_kv + h) * G, b, H_kv * G, T, FLOWS * V, BY_TOKEN) + f * V + tile_v * BV
    o_h, o_t = (FLOWS * V, H_kv * G * FLOWS * V) if BY_TOKEN else (tl.cast(T, tl.int64) * FLOWS * V, FLOWS * V)
    table_q += b * table_q_b + h * table_q_h + f * table_q_f
    token_q += b * token_q_b + h * token_q_h
    answer_queries(
        q, o, table_q, token_q, (high, low, high2, low2, z, z2, zs), (last, z_last), (column, z, z),
        q_h, q_t, q_d, o_h, o_t, table_q_g, token_q_g, token_q_t, G, first, end, V - tile_v * BV, eps,
        NORM, GROUPED, MAP_Q, TOKEN_Q, CONSTANT, False, PARTS, SPLIT, D, V, BT, BK, BV,
    )  # fmt: skip
