# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton adds tuples, but does not unpack them)
"""Gradients of the short convolution: x and dy are read once, dx is written once.

    u_t = sum_w taps[w] x_{t-w} + bias        recomputed
    du_t = dy_t act'(u_t)
    dx_t = sum_w taps[w] du_{t+w}  (+ dy_t)   and d_initial alike, the initial inputs being slots of their own
    d_taps[w] = sum_t du_t x_{t-w},  d_bias = sum_t du_t

The walk of the forward kernel. Slot s adds to the gradients of the W-1 slots before it, which wait in registers
(``waiting[i]`` belongs to slot s-1-i) and are complete when the walk is W-1 slots further. A segment therefore walks
into the next one for W-1 slots, without adding to d_taps there.

    partial  (B segments, W + 1, C) fp32: a program's share of d_weight, laid out like weight, and of d_bias
    dx       (B, T, C) contiguous; what no slot names is not written
    d_initial (N (W-1), C) contiguous
"""

import triton
import triton.language as tl

from linattn.kernels.convolution.device.slots import place_of, push, read_input, read_taps


@triton.jit(do_not_specialize=["T", "slots", "segments", "segment"])
def convolve_backward(
    dy, x, weight, bias, initial, places, dx, d_initial, partial,
    T, C, slots, segments, segment,
    dy_b, dy_t, dy_c, x_b, x_t, x_c, weight_c, weight_w,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_PLACES: tl.constexpr,
    SILU: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    c = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_ok, c_x, c_dy = c < C, c * x_c, c * dy_c
    first = (pid // blocks) % segments * segment
    end = tl.minimum(first + segment, slots)
    b = pid // blocks // segments
    x += b * x_b
    dy += b * dy_b
    dx += b * T * C

    taps = read_taps(weight, weight_c, weight_w, c, c_ok, W)
    zero = tl.zeros([BLOCK_C], tl.float32)
    offset, d_bias = zero, zero
    if HAS_BIAS:
        offset = tl.load(bias + c, mask=c_ok, other=0).to(tl.float32)
    ring, waiting, d_taps = (), (), (zero,)
    for i in tl.static_range(W - 1):
        place = place_of(first - 1 - i, places, b, slots, W, HAS_PLACES, HAS_INITIAL)
        ring = ring + (read_input(place, x, x_t, c_x, initial, C, c, c_ok, HAS_INITIAL).to(tl.float32),)
        waiting = waiting + (zero,)
        d_taps = d_taps + (zero,)

    for slot in range(first, end + (W - 1), GROUP):
        at, inputs, outer = (), (), ()
        for i in tl.static_range(GROUP):
            place = place_of(slot + i, places, b, slots, W, HAS_PLACES, HAS_INITIAL)
            at = at + (tl.where(slot + i < end + (W - 1), place, -1),)
            inputs = inputs + (read_input(at[i], x, x_t, c_x, initial, C, c, c_ok, HAS_INITIAL),)
            outer = outer + (tl.load(dy + at[i] * dy_t + c_dy, mask=c_ok & (at[i] + tl.zeros_like(c) >= 0), other=0),)
        for i in tl.static_range(GROUP):
            now, du = inputs[i].to(tl.float32), outer[i].to(tl.float32)
            own = zero
            if RESIDUAL:
                own = du
            if SILU:
                u = offset + taps[0] * now
                for w in tl.static_range(W - 1):
                    u += taps[w + 1] * ring[w]
                s = tl.sigmoid(u)
                # What is not a token has dy = 0, but its u may be anything.
                du = tl.where(at[i] >= 0, du * s * (1 + u * (1 - s)), 0.0)
            own += taps[0] * du

            mine = tl.where(slot + i < end, du, 0.0)
            d_bias += mine
            sums = (d_taps[0] + mine * now,)
            for w in tl.static_range(W - 1):
                sums = sums + (d_taps[w + 1] + mine * ring[w],)
            d_taps = sums

            done = own
            if W > 1:
                done = waiting[W - 2] + taps[W - 1] * du
                later = (own,)
                for w in tl.static_range(W - 2):
                    later = later + (waiting[w] + taps[w + 1] * du,)
                waiting = later
                ring = push(ring, now, W - 1)
            back = slot + i - (W - 1)
            place = place_of(back, places, b, slots, W, HAS_PLACES, HAS_INITIAL)
            place = tl.where((back >= first) & (back < end), place, -1)
            here = place + tl.zeros_like(c)
            tl.store(dx + place * C + c, done.to(dx.dtype.element_ty), mask=c_ok & (here >= 0))
            if HAS_INITIAL:
                rows = d_initial - (place + 2) * C + c
                tl.store(rows, done.to(d_initial.dtype.element_ty), mask=c_ok & (here <= -2))

    partial += (pid // blocks) * ((W + 1) * C) + c
    for w in tl.static_range(W):
        tl.store(partial + (W - 1 - w) * C, d_taps[w], mask=c_ok)
    tl.store(partial + W * C, d_bias, mask=c_ok)
