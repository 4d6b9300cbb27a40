# mypy: ignore-errors
"""What every step of decoding does to its state: S' = lambda S + key v^T, read on the way by all queries of the group.

A program has TILES tiles of BLOCK_V value columns of one key head, with all of K in each. It reads every number of
them once and writes it once.

    q              (.., H, K) of one batch element          head   the first query head of the group, of G
    key, lam       (K,) fp32, the key as it is added, and the decay of each of its channels
    read           factor on the queries
    v, kv, out, next_kv   those of the key head: (V,), (K, V), (G, V) contiguous, (K, V)
    z_new          (K,) fp32, the sum of keys that the queries see
"""

import triton
import triton.language as tl


@triton.jit
def place(H_kv, K, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr):
    """Of a program: batch element, key head, both as one row; part of the columns; channels, and which there are."""
    pid = tl.program_id(0).to(tl.int64)
    row, part = pid // PROGRAMS, pid % PROGRAMS
    d = tl.arange(0, BLOCK_K).to(tl.int64)
    return row // H_kv, row % H_kv, row, part, d, d < K


@triton.jit
def write_and_read(
    q, key, v, lam, read, kv, z_new, out, next_kv, eps, head, G, part,
    q_h, q_d, v_d, kv_d, kv_e, next_d, next_e,
    K: tl.constexpr, V: tl.constexpr,
    NORM: tl.constexpr,  # 0: none, 1: row sum + eps, 2: max(abs(row sum), 1)
    HAS_STATE: tl.constexpr, HAS_DECAY: tl.constexpr, KEY_INDEX: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_K).to(tl.int64)
    d_ok = d < K
    for i in range(TILES):
        e = (part * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
        e_ok = e < V
        ok = d_ok[:, None] & e_ok[None, :]
        value = tl.load(v + e * v_d, mask=e_ok, other=0).to(tl.float32)
        state = key[:, None] * value[None, :]
        if HAS_STATE:
            old = tl.load(kv + d[:, None] * kv_d + e[None, :] * kv_e, mask=ok, other=0)
            if HAS_DECAY and not KEY_INDEX:
                old = lam[:, None] * old
            state = old + state
        for g in range(G):
            query = tl.load(q + (head + g) * q_h + d * q_d, mask=d_ok, other=0).to(tl.float32) * read
            result = tl.sum(query[:, None] * state, axis=0)
            if NORM == 1:
                result = result / (tl.sum(query * z_new, axis=0) + eps)
            if NORM == 2:
                result = result / tl.maximum(tl.abs(tl.sum(query * z_new, axis=0)), 1.0)
            tl.store(out + g * V + e, result.to(out.dtype.element_ty), mask=e_ok)
        if HAS_DECAY and KEY_INDEX:
            state = lam[:, None] * state
        if IN_PLACE:
            # A tile smaller than the program is held by several threads: all must have read before one writes.
            tl.debug_barrier()
        tl.store(next_kv + d[:, None] * next_d + e[None, :] * next_e, state, mask=ok)
