"""States of segments, so that segments can be computed in parallel: what each adds by itself, then one scan over them.

Forward (REVERSE 0): x = k, y = v, a segment adds ``sum_s 2^(sum of decays after s) k_s v_s``.
Backward (REVERSE 1): x = q, y = the numerator's gradient, e = the denominator's: ``sum_t 2^(sum up to t) q_t y_t``.
x (B, H_x, T, K), y (B, H_x, T, V), a (B, H_x / G, T, K); e and scale (B, H_x, T) or none; results by
R = (B, H_x, segments) rows: kv (R, K, V), z (R, K), total (R, K), the segment's log decay, in units of log 2.
The mask hides keys and decays, not queries. NORMALIZED: z is wanted, else nothing is added to it.

Keys and queries are scaled and rounded as the sweeps do it: what a segment leaves behind is then what its sweep sees at
its end, to the last digits of fp32. A decay's gradient is a sum of differences from there on (see ``key_grad``).
"""
# mypy: ignore-errors
# ruff: noqa: SIM108 - conditions at compile time stay apart from those at run time

import triton
import triton.language as tl

from linattn.kernels.channel_decay.device.decays import (
    factor_columns,
    load_decay,
    passage,
    power,
    rounded,
    running_columns,
)
from linattn.kernels.channel_decay.device.parts import (
    add_product,
    as_rounded,
    live_keys,
    load_columns,
    load_rows,
    place,
    spread,
    tokens,
)


@triton.jit(do_not_specialize=["T", "span", "segments"])
def segment_states_kernel(
    x, y, a, scale, e, mask, table, kv, z, total,
    x_b, x_h, x_t: tl.constexpr, y_b, y_h, y_t: tl.constexpr, a_b, a_h, a_t: tl.constexpr, m_b, m_t,
    H, G, T, span, segments,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    C: tl.constexpr, REVERSE: tl.constexpr, NORMALIZED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr, EXACT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    kt, vt = (pid // NV) % NK, pid % NV
    row = pid // (NK * NV)
    segment, bh = row % segments, row // segments
    b, h, ha = bh // H, bh % H, (bh % H) // G
    start, end, _, first, _ = place(table, b, segment, T, span, PACKED)
    r = tl.arange(0, C)
    dk, dv = (kt * BK).to(tl.int32) + tl.arange(0, BK), (vt * BV).to(tl.int32) + tl.arange(0, BV)
    x += b * x_b + h * x_h
    y += b * y_b + h * y_h
    a += b * a_b + ha * a_h
    mask += b * m_b
    state = tl.zeros((BK, BV), dtype=tl.float32)
    z_state = tl.zeros((BK,), dtype=tl.float32)
    whole = tl.zeros((BK,), dtype=tl.float32)
    chunks = (end - start + C - 1) // C
    for i in range(0, chunks):
        if REVERSE:
            chunk = start + (chunks - 1 - i) * C
        else:
            chunk = start + i * C
        live = tokens(end, chunk, C)
        if not REVERSE:
            live = live_keys(mask + chunk * m_t, m_t, live, C, MASKED)
        a_c, _decaying = load_decay(
            a + chunk * a_t, mask + chunk * m_t, a_t, m_t, chunk, first, end, dk, K, C, SHIFT, MASKED
        )
        a_c = rounded(a_c, EXACT, DT)
        x_c = load_columns(x + chunk * x_t, x_t, live, dk, K, C).to(tl.float32)
        y_c = load_rows(y + chunk * y_t, y_t, live, dv, V, C)
        P, early, late, weakest = running_columns(a_c, C, EXACT)
        if REVERSE:
            seen, more, after = passage(late, early, weakest, EXACT)
        else:
            seen, more, after = passage(early, late, weakest, EXACT)
        x_c = x_c * power(factor_columns(P, a_c, early, late, weakest, C, not REVERSE, EXACT))
        met = seen * more
        if REVERSE and NORMALIZED:
            y_c = y_c.to(tl.float32) * tl.load(scale + bh * T + chunk + r, mask=live, other=0.0)[:, None]
        if NORMALIZED:
            z_c = as_rounded(x_c, DT, PRECISION)
            if REVERSE:
                z_c *= tl.load(e + bh * T + chunk + r, mask=live, other=0.0)[None, :]
            z_state = (z_state * met + tl.sum(z_c, 1)) * after
        state = add_product(state * met[:, None], x_c.to(DT), y_c.to(DT), PRECISION) * after[:, None]
        whole += early + late
    here = (dk < K)[:, None] & (dv < V)[None, :]
    tl.store(kv + row * K * V + dk[:, None] * V + dv[None, :], state, mask=here)
    tl.store(z + row * K + dk, z_state, mask=(dk < K) & (spread(vt, dk) == 0))
    tl.store(total + row * K + dk, whole, mask=(dk < K) & (spread(vt, dk) == 0))


@triton.jit(do_not_specialize=["segments"])
def scan_states_kernel(
    kv, z, total, kv_0, z_0, table, H, segments,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr, HAS_START: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """In place: what each segment adds becomes the state it starts from (REVERSE: the gradient at its end).

    kv_0, z_0 (N, H / STEP, ..) are where a sequence starts, for the first of each STEP heads; the others start from 0.
    """
    pid = tl.program_id(0).to(tl.int64)
    kt, vt = (pid // NV) % NK, pid % NV
    bh = pid // (NK * NV)
    b, h = bh // H, bh % H
    dk, dv = kt * BK + tl.arange(0, BK), vt * BV + tl.arange(0, BV)
    here = (dk < K)[:, None] & (dv < V)[None, :]
    cell, vector = dk[:, None] * V + dv[None, :], dk
    state = tl.zeros((BK, BV), dtype=tl.float32)
    z_state = tl.zeros((BK,), dtype=tl.float32)
    previous = b * 0 - 1
    for i in range(0, segments):
        segment = i
        if REVERSE:
            segment = segments - 1 - i
        sequence, empty = b * 0, b < 0
        if PACKED:
            sequence = tl.load(table + segment * 5 + 2)
            empty = tl.load(table + segment * 5) == tl.load(table + segment * 5 + 1)
        if not empty:
            if sequence != previous:
                state = tl.zeros((BK, BV), dtype=tl.float32)
                z_state = tl.zeros((BK,), dtype=tl.float32)
                if HAS_START:
                    begin = (b + sequence) * (H // STEP) + h // STEP
                    own = spread(h % STEP, dk) == 0
                    state = tl.load(kv_0 + begin * K * V + cell, mask=here & own[:, None], other=0.0)
                    z_state = tl.load(z_0 + begin * K + vector, mask=(dk < K) & own, other=0.0)
                previous = sequence
            row = bh * segments + segment
            gain = tl.load(kv + row * K * V + cell, mask=here, other=0.0)
            tl.store(kv + row * K * V + cell, state, mask=here)
            kept = power(tl.load(total + row * K + dk, mask=dk < K, other=0.0))
            state = state * kept[:, None] + gain
            if vt == 0:
                z_gain = tl.load(z + row * K + vector, mask=dk < K, other=0.0)
                tl.store(z + row * K + vector, z_state, mask=dk < K)
                z_state = z_state * kept + z_gain
