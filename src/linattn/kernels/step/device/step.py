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

from linattn.kernels.step.device.columns import place, write_and_read


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
    b, h, row, part, d, d_ok = place(H_kv, K, BLOCK_K, PROGRAMS)
    key = tl.load(k + b * k_b + h * k_h + d * k_d, mask=d_ok, other=0).to(tl.float32)
    lam = tl.full([BLOCK_K], 1.0, tl.float32)
    if HAS_DECAY:
        if CHANNELS:
            lam = tl.exp(tl.load(decay + b * decay_b + h * decay_h + d * decay_d, mask=d_ok, other=0).to(tl.float32))
        else:
            lam *= tl.exp(tl.load(decay + b * decay_b + h * decay_h).to(tl.float32))
    z_new = key
    first = d_ok & (part + tl.zeros_like(d) == 0)
    z_ok = d_ok if NORM != 0 else first
    if HAS_STATE:
        z_old = tl.load(z + b * z_b + h * z_h + d * z_d, mask=z_ok, other=0)
        if HAS_DECAY and not KEY_INDEX:
            z_old = lam * z_old
        z_new = z_old + key

    if IN_PLACE:
        next_kv, next_d, next_e = next_kv + b * kv_b + h * kv_h, kv_d, kv_e
        next_z += b * z_b + h * z_h + d * z_d
    else:
        next_kv, next_d, next_e = next_kv + row * (K * V), V, 1
        next_z += row * K + d
    write_and_read(
        q + b * q_b, key, v + b * v_b + h * v_h, lam, 1.0, kv + b * kv_b + h * kv_h, z_new, out + row * G * V, next_kv,
        eps, h * G, G, part, q_h, q_d, v_d, kv_d, kv_e, next_d, next_e,
        K, V, NORM, HAS_STATE, HAS_DECAY, KEY_INDEX, IN_PLACE, BLOCK_K, BLOCK_V, TILES,
    )  # fmt: skip
    if HAS_DECAY and KEY_INDEX:
        z_new = lam * z_new
    tl.store(next_z, z_new, mask=first)
