# mypy: ignore-errors
"""Outputs of attention whose weights decay with the distance in both directions, each chunk of q, k and v read once.

    o_i = (sum_j M_ij (q_i . k_j) v_j) / n_i        M_ij = exp2(min(f_i - f_j, b_j - b_i)) inside a chunk

f and b never increase along a chunk: of the two differences, that of the pair's own direction is at most 0 and the
other at least 0; on the diagonal both are 0. So the minimum is the pair's log weight, without a mask, however steep.

    q (B, H, T, K)   k (B, HS, T, K)   v (B, HS, T, V)   out (B, H, T, V)
    den     (2, B, H, T) fp32: row sums of both directions, and of the keys after the row alone
    gates, totals: see both_ways_gates   behind, sums, tails: see both_ways_states   starts: see both_ways_scan

A program has one sequence, query head and segment. Along time the state is in registers. Against time the state after
a chunk is that of the rest of the segment (behind) plus that after the segment times a tail: two products, the second
with an operand that does not change.
NORM: 0 none, 1 sum, 2 abs_max_one. STARTS: there is more than one segment. SIDE_BY_SIDE: heads of a token
that lie together in out, see first_row.
"""

import triton
import triton.language as tl

from linattn.kernels.causal.device.both_ways_places import segment_of
from linattn.kernels.causal.device.parts import first_row, held_no_longer, inside


@triton.jit(do_not_specialize=["T", "segment", "NSEG", "H", "HS", "chunks", "pieces", "mask_b", "plane", "eps"])
def outputs_both_ways(
    q, q_b, q_h, q_t, q_d, k, k_b, k_h, k_t, k_d, v, v_b, v_h, v_t, v_d, out, den, den_plane,
    gates, plane, totals, key_mask, mask_b, cu, starts, starts_plane, behind, sums, sums_plane, tails,
    T, segment, NSEG, H, HS, chunks, pieces, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, L: tl.constexpr,
    DIV: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr, NORM: tl.constexpr, STARTS: tl.constexpr,
    Q_T: tl.constexpr, K_T: tl.constexpr, V_T: tl.constexpr, BF16: tl.constexpr, STAGES: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    # Q_T, K_T, V_T: strides of tokens that the compiler may know, 0 where not.
    if Q_T > 0:
        q_t = Q_T
    if K_T > 0:
        k_t = K_T
    if V_T > 0:
        v_t = V_T
    DT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    h = pid % H
    pid = pid // H
    seg = pid % NSEG
    n = pid // NSEG
    hs = h // DIV
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
    qo = i[:, None] * q_t + ek[None, :] * q_d
    ko = ek[:, None] * k_d + i[None, :] * k_t
    vo = i[:, None] * v_t + ew[None, :] * v_d
    so = ek[:, None] * V + ew[None, :]
    q += b * q_b + h * q_h + start * q_t
    k += b * k_b + hs * k_h + start * k_t
    v += b * v_b + hs * v_h + start * v_t
    row = (b * H + h) * T + start
    if MASK:
        key_mask += b * mask_b + start

    S = tl.zeros([BK, BW], tl.float32)
    z = tl.zeros([BK], tl.float32)
    z_after = tl.zeros([BK], tl.float32)
    if STARTS:
        begun = starts + piece * (K * V + K)
        S = tl.load(begun + so, mask=there, other=0.0)
        after = tl.load(begun + starts_plane + so, mask=there, other=0.0).to(DT)
        if NORM > 0:
            z = tl.load(begun + K * V + ek, mask=k_ok, other=0.0)
            z_after = tl.load(begun + starts_plane + K * V + ek, mask=k_ok, other=0.0)
    S_dt = S.to(DT)
    left = (end - start).to(tl.int32)
    for c in tl.range(0, count, num_stages=STAGES):
        place = place0 + c
        at = (place - place0) * L  # 64-bit
        ok = i < left - c * L
        rows = ok
        if MASK:
            rows = ok & (tl.load(key_mask + at + i, mask=ok, other=0) != 0)
        f = tl.load(gates + place * L + i)
        back = tl.load(gates + plane + place * L + i)
        total = tl.load(totals + place)
        columns = rows[None, :] if K == BK else k_ok[:, None] & rows[None, :]
        qv = tl.load(q + at * q_t + qo, mask=inside(ok, k_ok, K, BK), other=0.0).to(DT)
        kv = tl.load(k + at * k_t + ko, mask=columns, other=0.0).to(DT)
        vv = tl.load(v + at * v_t + vo, mask=inside(rows, w_ok, V, BW), other=0.0).to(DT)
        to_come = tl.load(behind + place * (K * V) + so, mask=there, other=0.0).to(DT)
        if BF16:
            held_no_longer(qv)
            held_no_longer(kv)
            held_no_longer(to_come)
        reach = tl.exp2(f)
        reach_back = tl.exp2(total - back)
        keep = tl.exp2(total)
        # All that needs a tile in registers is done at once, before the products take them.
        written = (vv.to(tl.float32) * tl.exp2(total - f)[:, None]).to(DT)
        if NORM > 0:
            z_back = tl.load(sums + sums_plane + place * K + ek, mask=k_ok, other=0.0)
            z_back += z_after * tl.load(tails + place)
            queries = qv.to(tl.float32)
            below = tl.sum(queries * z[None, :], axis=1) * reach
            above = tl.sum(queries * z_back[None, :], axis=1) * reach_back
            z = z * keep + tl.load(sums + place * K + ek, mask=k_ok, other=0.0)
        P = tl.dot(qv, kv, input_precision="tf32")
        P = P * tl.exp2(tl.minimum(f[:, None] - f[None, :], back[None, :] - back[:, None]))
        if NORM > 0:
            above += tl.sum(tl.where(i[:, None] < i[None, :], P, 0.0), axis=1)
            below += tl.sum(tl.where(i[:, None] < i[None, :], 0.0, P), axis=1)
        weights = P.to(DT)
        if STARTS:
            acc = tl.dot(qv, after, input_precision="tf32") * tl.load(tails + place)
            acc = tl.dot(qv, to_come, acc, input_precision="tf32") * reach_back[:, None]
        else:
            acc = tl.dot(qv, to_come, input_precision="tf32") * reach_back[:, None]
        acc += tl.dot(qv, S_dt, input_precision="tf32") * reach[:, None]
        acc = tl.dot(weights, vv, acc, input_precision="tf32")
        S = tl.dot(kv, written, S * keep, input_precision="tf32")
        # Used in the chunk that made it, the state is waited for, and with it every product: none is still reading when
        # the next operands arrive in the same place.
        S_dt = S.to(DT)
        if NORM > 0:
            both = below + above
            tl.store(den + row + at + i, both, mask=ok)
            tl.store(den + den_plane + row + at + i, above, mask=ok)
            if NORM == 1:
                acc = acc * (1.0 / (both + eps))[:, None]
            if NORM == 2:
                acc = acc * (1.0 / tl.maximum(tl.abs(both), 1.0))[:, None]
        first = first_row(b, h, H, start + at, T, V, SIDE_BY_SIDE)
        target = out + first + i[:, None] * (SIDE_BY_SIDE * V) + ew[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside(ok, w_ok, V, BW))
