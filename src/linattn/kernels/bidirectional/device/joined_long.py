# mypy: ignore-errors
"""Gradients for both flows of split_power from states in memory, one segment of a sequence a program: for long ones.

Shapes as in query_grad and key_grad with FLOWS = 2, but dq (B, G H_kv, T, D) and dk (B, H_kv, T, D); no factors per
token or constants. Of z and of the tables flow 0 gets the gradients, those of flow 1 are 0. Grids: N H_kv segments.
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.features import exchanged, turns
from linattn.kernels.bidirectional.device.joined_keys import walk_joined_keys
from linattn.kernels.bidirectional.device.joined_queries import walk_joined_queries
from linattn.kernels.bidirectional.device.memory import head_start, load_state, load_vector, segment_of, store_state


@triton.jit
def load_four(state, turned, D: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """S_00, S_01, S_10, S_11 of a head's two flat states, the parts of flow 1 exchanged where it is turned."""
    second = state + 2 * D * (V + 1)
    S00, S01 = load_state(state, D, V, D, BV), load_state(state + D * V, D, V, D, BV)
    S10, S11 = exchanged(load_state(second, D, V, D, BV), load_state(second + D * V, D, V, D, BV), turned)
    return S00, S01, S10, S11


@triton.jit(do_not_specialize=["T", "N", "H_kv", "G", "segments", "eps"])
def bidirectional_joined_query_grad(
    q, do, state, cu_seqlens, dq, partial, table_q, d_table_q, table_k,
    q_b, q_h, q_t, q_d, do_b, do_h, do_t, do_d,
    table_q_b, table_q_h, table_q_g, table_q_f, table_k_b, table_k_h, table_k_f,
    N, H_kv, G, T, segments, eps,
    NORM: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr, LEARN_Q: tl.constexpr, SPLIT: tl.constexpr,
    BY_TOKEN: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = 2 * D * (V + 1)
    pid = tl.program_id(0)
    segment, row = pid % segments, (pid // segments).to(tl.int64)
    n, h = row // H_kv, row % H_kv
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    table_q += b * table_q_b + h * table_q_h
    table_k += b * table_k_b + h * table_k_h
    state += row * 2 * SIZE
    # The states are those of the keys of each flow: their parts meet other parts where the queries turn.
    turned_q = turns(table_q, table_q_f, 2 * D, D)[:, None]
    turned = turned_q != turns(table_k, table_k_f, 2 * D, D)[:, None]
    S00, S01, S10, S11 = load_four(state, turned_q, D, V, BV)
    z, z2 = load_vector(state + 2 * D * V, D, D), load_vector(state + 2 * D * V + D, D, D)
    place = segment.to(tl.int64) * N * H_kv + row
    dq += head_start((b * H_kv + h) * G, b, H_kv * G, T, D, BY_TOKEN)
    dq_h, dq_t = (D, H_kv * G * D) if BY_TOKEN else (tl.cast(T, tl.int64) * D, D)
    dS00, dS01, dS10, dS11, dz, dz2 = walk_joined_queries(
        q + b * q_b + h * G * q_h, do + b * do_b + h * G * do_h, dq,
        table_q, d_table_q + place * G * 8 * D, (S00, S01, S10, S11, z[:, None], z2[:, None], turned),
        q_h, q_t, q_d, do_h, do_t, do_d, dq_h, dq_t, table_q_g, G, first, end, eps,
        NORM, GROUPED, LEARN_Q, SPLIT, D, V, BT, BV,
    )  # fmt: skip
    dS10, dS11 = exchanged(dS10, dS11, turned_q)
    partial += place * 2 * SIZE
    nothing = tl.zeros((D,), tl.float32)
    store_state(partial, dS00, dz, 0, False, 2 * D, D, V, D, BV)
    store_state(partial, dS01, dz2, D, False, 2 * D, D, V, D, BV)
    store_state(partial + SIZE, dS10, nothing, 0, False, 2 * D, D, V, D, BV)
    store_state(partial + SIZE, dS11, nothing, D, False, 2 * D, D, V, D, BV)


@triton.jit(do_not_specialize=["T", "N", "H_kv", "segments"])
def bidirectional_joined_key_grad(
    k, v, d_state, mask, cu_seqlens, dk, dv, table_k, d_table_k,
    k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, mask_b, mask_t, table_k_b, table_k_h, table_k_f,
    N, H_kv, T, segments,
    HAS_MASK: tl.constexpr, PACKED: tl.constexpr, LEARN_K: tl.constexpr, SPLIT: tl.constexpr,
    BY_TOKEN_K: tl.constexpr, BY_TOKEN_V: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = 2 * D * (V + 1)
    pid = tl.program_id(0)
    segment, row = pid % segments, (pid // segments).to(tl.int64)
    n, h = row // H_kv, row % H_kv
    b, first, end = segment_of(n, segment, segments, cu_seqlens, T, PACKED, BT)
    table_k += b * table_k_b + h * table_k_h
    d_state += row * 2 * SIZE
    turned = turns(table_k, table_k_f, 2 * D, D)[:, None]
    dS00, dS01, dS10, dS11 = load_four(d_state, turned, D, V, BV)
    dz, dz2 = load_vector(d_state + 2 * D * V, D, D), load_vector(d_state + 2 * D * V + D, D, D)
    place = segment.to(tl.int64) * N * H_kv + row
    dk += head_start(b * H_kv + h, b, H_kv, T, D, BY_TOKEN_K)
    dv += head_start(b * H_kv + h, b, H_kv, T, 2 * V, BY_TOKEN_V)
    dk_t = H_kv * D if BY_TOKEN_K else D
    dv_t = H_kv * 2 * V if BY_TOKEN_V else 2 * V
    walk_joined_keys(
        k + b * k_b + h * k_h, v + b * v_b + h * v_h, mask + b * mask_b, dk, dv,
        table_k, d_table_k + place * 8 * D, (dS00, dS01, dS10, dS11, dz, dz2),
        k_t, k_d, v_t, v_d, dk_t, dv_t, mask_t, first, end,
        HAS_MASK, LEARN_K, SPLIT, D, V, BT, BV, STAGES,
    )  # fmt: skip
