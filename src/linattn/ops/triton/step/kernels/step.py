# mypy: ignore-errors
"""One token of causal linear attention: each number of the state is read once and written once.

    decay_index="query":  R = lambda S + k v^T,  o = q R / n,  S' = R
    decay_index="key":    R = S + k v^T,         o = q R / n,  S' = lambda R

Names and shapes. A program has a slice of the value columns of one key head, with all of K in its tile, and serves
all query heads of the group, so that none of them reads the state again.

    q      (B, H, K)         query features, H = H_kv G
    k      (B, H_kv, K)      key features
    v      (B, H_kv, V)
    decay  log lambda, read through strides: 0 where it does not vary
    kv     (B, H_kv, K, V)   fp32, S before the token
    z      (B, H_kv, K)      fp32, the decayed sum of keys before the token
    out    (B, H, V)         contiguous
    next_kv, next_z          the state after the token: contiguous, or kv and z themselves (IN_PLACE)

A head's value columns are cut into tiles of BLOCK_V, and TILES of them go to one program. With several programs a
head, all of them read z and the first writes it: in place that would be a race, unless only the first reads it
(NORM = 0) or there is only one.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["eps"])
def step(
    q, k, v, decay, kv, z, out, next_kv, next_z,
    eps, H_kv, G,
    q_b, q_h, q_d, k_b, k_h, k_d, v_b, v_h, v_d, decay_b, decay_h, decay_d,
    kv_b, kv_h, kv_d, kv_e, z_b, z_h, z_d,
    K: tl.constexpr, V: tl.constexpr,
    NORM: tl.constexpr,  # 0: none, 1: row sum + eps, 2: max(abs(row sum), 1)
    HAS_STATE: tl.constexpr, HAS_DECAY: tl.constexpr, CHANNELS: tl.constexpr, KEY_INDEX: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    row, part = pid // PROGRAMS, pid % PROGRAMS  # row: one key head of one batch element
    b, h = row // H_kv, row % H_kv
    d = tl.arange(0, BLOCK_K).to(tl.int64)
    d_ok = d < K

    key = tl.load(k + b * k_b + h * k_h + d * k_d, mask=d_ok, other=0).to(tl.float32)
    if HAS_DECAY:
        if CHANNELS:
            lam = tl.exp(tl.load(decay + b * decay_b + h * decay_h + d * decay_d, mask=d_ok, other=0).to(tl.float32))
        else:
            lam = tl.exp(tl.load(decay + b * decay_b + h * decay_h).to(tl.float32) + tl.zeros([BLOCK_K], tl.float32))
    z_new = key
    first = d_ok & (part + tl.zeros_like(d) == 0)
    z_ok = d_ok if NORM != 0 else first
    if HAS_STATE:
        z_old = tl.load(z + b * z_b + h * z_h + d * z_d, mask=z_ok, other=0)
        if HAS_DECAY and not KEY_INDEX:
            z_old = lam * z_old
        z_new = z_old + key

    kv_in = kv + b * kv_b + h * kv_h
    if IN_PLACE:
        kv_out, z_out = next_kv + b * kv_b + h * kv_h, next_z + b * z_b + h * z_h + d * z_d
    else:
        kv_out, z_out = next_kv + row * (K * V), next_z + row * K + d
    for i in range(TILES):
        e = (part * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
        e_ok = e < V
        ok = d_ok[:, None] & e_ok[None, :]
        value = tl.load(v + b * v_b + h * v_h + e * v_d, mask=e_ok, other=0).to(tl.float32)
        state = key[:, None] * value[None, :]
        if HAS_STATE:
            old = tl.load(kv_in + d[:, None] * kv_d + e[None, :] * kv_e, mask=ok, other=0)
            if HAS_DECAY and not KEY_INDEX:
                old = lam[:, None] * old
            state = old + state
        for g in range(G):
            head = h * G + g
            query = tl.load(q + b * q_b + head * q_h + d * q_d, mask=d_ok, other=0).to(tl.float32)
            result = tl.sum(query[:, None] * state, axis=0)
            if NORM == 1:
                result = result / (tl.sum(query * z_new, axis=0) + eps)
            if NORM == 2:
                result = result / tl.maximum(tl.abs(tl.sum(query * z_new, axis=0)), 1.0)
            tl.store(out + ((b * H_kv + h) * G + g) * V + e, result.to(out.dtype.element_ty), mask=e_ok)
        if HAS_DECAY and KEY_INDEX:
            state = lam[:, None] * state
        if IN_PLACE:
            # A tile smaller than the program is held by several threads: all must have read before one writes.
            tl.debug_barrier()
            tl.store(kv_out + d[:, None] * kv_d + e[None, :] * kv_e, state, mask=ok)
        else:
            tl.store(kv_out + d[:, None] * V + e[None, :], state, mask=ok)
    if HAS_DECAY and KEY_INDEX:
        z_new = lam * z_new
    tl.store(z_out, z_new, mask=first)
