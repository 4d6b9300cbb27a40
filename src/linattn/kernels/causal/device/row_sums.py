# mypy: ignore-errors
# ruff: noqa: SIM102  (a condition known to the compiler stands alone)
"""The row sums of causal attention in a walk of their own, so that the walk of the outputs only loads them.

    n_i = q_i . z_i        z_i = sum_j M_ij k_j        j at or before i; with REVERSE strictly after i

    q (B, H, T, K)   k (B, HS, T, K)   parts (PARTS, B, H, T) fp32, of BK features each: they add up to the row sums
    GATE 0  M is 1
    GATE 1  gates (B, HS, T), keeps (.., chunks) of potentials: write_j, and what a chunk leaves of a sum
    GATE 2  gates (B, HS, T, 2), keeps (B, HS, T), spans of exponential_units: column_j first in gates
    z0    (sequences, HS, NSEG, K) fp32, sums before the segments; z1 where the walk ends

Gates are factors of keys, and sums are in the unit of their chunk: those of decays want the factor of their row,
1 / write_i, when they are read. Only walks without a chunk that is too steep for factors are made here; the walk of the
outputs makes the others itself.

A chunk's L tokens lie as strips of LONG tokens, one after another in a thread: along a strip z is carried along, and
strips meet in sums that lanes of a single warp exchange. All of it is fp32 outside the tensor cores, with no key
rounded and nothing added that is subtracted again: a row sum that is a small difference keeps its digits. A program has
one sequence, query head, segment and BK features.
"""

import triton
import triton.language as tl

from linattn.kernels.causal.device.parts import shortest, unpacked, weakest


@triton.jit
def keys_at(at, i, ok, k, k_t, ko, gates, key_mask, k_ok, DT: tl.constexpr, GATE: tl.constexpr, MASK: tl.constexpr):
    """Keys of one token of each strip with their factors, (strips, BK) fp32."""
    rows = ok
    if MASK:
        rows = ok & (tl.load(key_mask + at + i, mask=ok, other=0) != 0)
    found = tl.load(k + at * k_t + i[:, None] * k_t + ko, mask=rows[:, None] & k_ok, other=0.0)
    found = unpacked(found.to(DT))
    if GATE > 0:
        found = found * tl.load(gates + GATE * (at + i), mask=ok, other=0.0)[:, None]
    return found


@triton.jit
def of_pairs(x, before, BLOCK: tl.constexpr):
    """Sums of pairs of rows; before, with the first row of each pair added for the second half of its BLOCK rows."""
    SHAPE: tl.constexpr = before.shape
    if SHAPE[0] >= BLOCK:
        pairs = tl.reshape(x, [SHAPE[0] // BLOCK, 2, SHAPE[1]])
        first = tl.sum(tl.where((tl.arange(0, 2) == 0)[None, :, None], pairs, 0.0), axis=1)
        second = (tl.arange(0, BLOCK) >= BLOCK // 2)[None, :, None]
        before += tl.reshape(tl.where(second, first[:, None, :], 0.0), SHAPE)
        x = tl.sum(pairs, axis=1)
    return x, before


@triton.jit
def sums_before(x):
    """Of up to 16 rows: the sum of all, (1, BK), and for each row the sum of those above it."""
    before = tl.zeros(x.shape, tl.float32)
    x, before = of_pairs(x, before, 2)
    x, before = of_pairs(x, before, 4)
    x, before = of_pairs(x, before, 8)
    return of_pairs(x, before, 16)


@triton.jit(do_not_specialize=["T", "segment", "NSEG", "H", "HS", "chunks", "mask_b", "plane"])
def row_sums(
    q, q_b, q_h, q_t, q_d, k, k_b, k_h, k_t, k_d, parts, plane, gates, keeps, spans, key_mask, mask_b, cu, z0, z1,
    T, segment, NSEG, H, HS, chunks,
    K: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, L: tl.constexpr, LONG: tl.constexpr, DIV: tl.constexpr,
    REVERSE: tl.constexpr, GATE: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr, Z0: tl.constexpr,
    Z1: tl.constexpr, EVEN: tl.constexpr, Q_T: tl.constexpr, K_T: tl.constexpr, BF16: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # EVEN: no chunk ends beyond the sequence. Q_T, K_T: strides of tokens that the compiler may know, 0 where not.
    if Q_T > 0:
        q_t = Q_T
    if K_T > 0:
        k_t = K_T
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    STRIPS: tl.constexpr = L // LONG
    pid = tl.program_id(0).to(tl.int64)
    part = pid % PARTS
    pid = pid // PARTS
    h = pid % H
    pid = pid // H
    seg = pid % NSEG
    n = pid // NSEG
    hs = h // DIV
    if PACKED:
        b = n * 0
        first = tl.load(cu + n).to(tl.int64)
        last = tl.load(cu + n + 1).to(tl.int64)
        chunk0 = hs * chunks + first // L + n
    else:
        b = n
        first = n * 0
        last = first + T
        chunk0 = (n * HS + hs) * chunks
    chunk0 += (seg * segment) // L
    start = first + seg * segment
    end = tl.minimum(start + segment, last)
    count = tl.cdiv(tl.maximum(end - start, 0), L).to(tl.int32)
    if GATE == 1:
        if weakest(keeps + chunk0, count) < 8.7565e-27:  # the same bound as in sweep
            return
    if GATE == 2:
        if shortest(spans + chunk0, count, L) < L:
            return

    s = tl.arange(0, STRIPS)
    ek = (part * BK).to(tl.int32) + tl.arange(0, BK)
    k_ok = (ek < K)[None, :] if K % BK > 0 else (ek >= 0)[None, :]
    state = (n * HS + hs) * NSEG + seg
    z = tl.zeros([STRIPS, BK], tl.float32)  # all rows alike
    if Z0:
        z += tl.load(z0 + state * K + ek, mask=ek < K, other=0.0)[None, :]
    q += b * q_b + h * q_h
    k += b * k_b + hs * k_h
    qo = ek[None, :] * q_d
    ko = ek[None, :] * k_d
    parts += part * plane + (b * H + h) * T
    if MASK:
        key_mask += b * mask_b
    if GATE > 0:
        gates += GATE * (b * HS + hs) * T
    if GATE == 2:
        keeps += (b * HS + hs) * T
    for step in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - step if REVERSE else step
        at = start + c.to(tl.int64) * L
        there = L if EVEN else tl.minimum(end - at, L).to(tl.int32)
        if GATE == 1:
            z = z * tl.load(keeps + chunk0 + c)
        if GATE == 2:
            z = z * tl.load(keeps + at)
        keys = ()
        more = tl.zeros([STRIPS, BK], tl.float32)
        for r in tl.static_range(0, LONG):
            i = L - 1 - r - s * LONG if REVERSE else r + s * LONG
            found = keys_at(at, i, i < there, k, k_t, ko, gates, key_mask, k_ok, DT, GATE, MASK)
            more += found
            keys = keys + (found,)  # noqa: RUF005
        gained, before = sums_before(more)
        after = z + gained
        z += before
        products = ()
        for r in tl.static_range(0, LONG):
            i = L - 1 - r - s * LONG if REVERSE else r + s * LONG
            if not REVERSE:
                z += keys[r]
            qv = tl.load(q + at * q_t + i[:, None] * q_t + qo, mask=(i < there)[:, None] & k_ok, other=0.0)
            products = products + (unpacked(qv.to(DT)) * z,)  # noqa: RUF005
            if REVERSE:
                z += keys[r]
        for r in tl.static_range(0, LONG):
            i = L - 1 - r - s * LONG if REVERSE else r + s * LONG
            tl.store(parts + at + i, tl.sum(products[r], axis=1), mask=i < there)
        z = after

    if Z1:
        if h % DIV == 0:
            tl.store(z1 + state * K + ek, tl.sum(z, axis=0) * (1.0 / STRIPS), mask=ek < K)
