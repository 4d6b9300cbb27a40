# mypy: ignore-errors
"""What each segment adds to the states of both directions, and the states between its chunks, in one pass over k and v.

    k (B, HS, T, K)   v (B, HS, T, V)   gates, totals: see both_ways_gates

    gains   (2, segment places, K V + K) fp32: sum_j weight_j k_j v_j^T and sum_j weight_j k_j of a segment, weighed
            to its end (first plane, along time) and to its start (second, against it)
    kepts   (segment places,) fp32: what a segment leaves of a state
    behind  (places, K, V): of the tokens of the segment after a chunk, in the unit of the chunk's end
    sums    (2, places, K) fp32: the sum of a chunk's keys, in the unit of its end, and that of the keys after it
    tails   (places,) fp32: what the chunks of the segment after a chunk leave of a state

A program has one sequence, key head and segment, and walks against time. So the states against time result directly,
and a chunk's weight along time has the decay of the chunks after it as one more factor. SUMS: keys are summed.
"""

import triton
import triton.language as tl

from linattn.kernels.causal.device.both_ways_places import segment_of
from linattn.kernels.causal.device.parts import held_no_longer, inside


@triton.jit(do_not_specialize=["T", "segment", "NSEG", "HS", "chunks", "pieces", "mask_b", "plane"])
def states_both_ways(
    k, k_b, k_h, k_t, k_d, v, v_b, v_h, v_t, v_d, gates, plane, totals, key_mask, mask_b, cu,
    gains, gains_plane, kepts, behind, sums, sums_plane, tails, T, segment, NSEG, HS, chunks, pieces,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, L: tl.constexpr,
    PACKED: tl.constexpr, MASK: tl.constexpr, SUMS: tl.constexpr, K_T: tl.constexpr, V_T: tl.constexpr,
    BF16: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # K_T, V_T: strides of tokens that the compiler may know, 0 where not.
    if K_T > 0:
        k_t = K_T
    if V_T > 0:
        v_t = V_T
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    hs = pid % HS
    pid = pid // HS
    seg = pid % NSEG
    n = pid // NSEG
    b, start, end, place0, piece = segment_of(n, hs, seg, cu, T, segment, HS, chunks, pieces, L, PACKED)
    if start >= end:
        return
    count = tl.cdiv(end - start, L).to(tl.int32)

    i = tl.arange(0, L)
    ek = tl.arange(0, BK)
    ew = tl.arange(0, BW)
    k_ok = ek < K
    w_ok = ew < V
    there = k_ok[:, None] & w_ok[None, :]
    ko = ek[:, None] * k_d + i[None, :] * k_t
    vo = i[:, None] * v_t + ew[None, :] * v_d
    so = ek[:, None] * V + ew[None, :]
    k += b * k_b + hs * k_h + start * k_t
    v += b * v_b + hs * v_h + start * v_t
    if MASK:
        key_mask += b * mask_b + start
    along = tl.zeros([BK, BW], tl.float32)
    against = tl.zeros([BK, BW], tl.float32)
    z_along = tl.zeros([BK], tl.float32)
    z_against = tl.zeros([BK], tl.float32)
    held = against.to(DT)
    tail = tl.full([], 0.0, tl.float32)
    left = (end - start).to(tl.int32)
    for step in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - step
        at = c.to(tl.int64) * L
        rows = i < left - c * L
        if MASK:
            rows = rows & (tl.load(key_mask + at + i, mask=rows, other=0) != 0)
        place = place0 + c
        f = tl.load(gates + place * L + i)
        back = tl.load(gates + plane + place * L + i)
        total = tl.load(totals + place)
        columns = rows[None, :] if K == BK else k_ok[:, None] & rows[None, :]
        kv = tl.load(k + at * k_t + ko, mask=columns, other=0.0).to(DT)
        vv = tl.load(v + at * v_t + vo, mask=inside(rows, w_ok, V, BW), other=0.0).to(DT)
        if BF16:
            held_no_longer(kv)
        to_end = tl.exp2(total - f)
        whole = vv.to(tl.float32)
        later = (whole * (to_end * tl.exp2(tail))[:, None]).to(DT)
        earlier = (whole * tl.exp2(back)[:, None]).to(DT)
        tl.store(behind + place * (K * V) + so, held.to(behind.dtype.element_ty), mask=there)
        tl.store(tails + place, tl.exp2(tail))
        keep = tl.exp2(total)
        if SUMS:
            keys = kv.to(tl.float32)
            gained = tl.sum(keys * to_end[None, :], axis=1)
            tl.store(sums + place * K + ek, gained, mask=k_ok)
            tl.store(sums + sums_plane + place * K + ek, z_against, mask=k_ok)
            z_along += gained * tl.exp2(tail)
            z_against = z_against * keep + tl.sum(keys * tl.exp2(back)[None, :], axis=1)
        along = tl.dot(kv, later, along, input_precision="tf32")
        against = tl.dot(kv, earlier, against * keep, input_precision="tf32")
        # Rounded in the chunk that made it, the state is waited for, and with it both products: none is still reading
        # when the next operands arrive in the same place.
        held = against.to(DT)
        tail += total
    gain = gains + piece * (K * V + K)
    tl.store(gain + so, along, mask=there)
    tl.store(gain + gains_plane + so, against, mask=there)
    tl.store(kepts + piece, tl.exp2(tail))
    if SUMS:
        tl.store(gain + K * V + ek, z_along, mask=k_ok)
        tl.store(gain + gains_plane + K * V + ek, z_against, mask=k_ok)
