# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton adds tuples, but does not unpack them)
"""The short convolution: x is read once and y written once.

    y_t = act(sum_w taps[w] x_{t-w} + bias)   (+ x_t)

A program takes BLOCK_C channels and walks over one segment of a row's slots (see slots), with the last
W-1 inputs in registers. The loads of GROUP slots are issued before the first of them is used: their number in
flight is what keeps the memory busy.

    x        (B, T, C) through strides
    weight   (C, W) through strides, bias (C,), initial (N (W-1), C) contiguous
    places   (B, slots) int32
    y        (B, T, C) contiguous; what no slot names is not written
"""

import triton
import triton.language as tl

from linattn.kernels.convolution.device.slots import place_of, push, read_input, read_taps


@triton.jit(do_not_specialize=["T", "slots", "segments", "segment"])
def convolve_forward(
    x, weight, bias, initial, places, y,
    T, C, slots, segments, segment,
    x_b, x_t, x_c, weight_c, weight_w,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_PLACES: tl.constexpr,
    SILU: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    c = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_ok, c_x = c < C, c * x_c
    first = (pid // blocks) % segments * segment
    b = pid // blocks // segments
    x += b * x_b
    y += b * T * C

    taps = read_taps(weight, weight_c, weight_w, c, c_ok, W)
    offset = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + c, mask=c_ok, other=0).to(tl.float32)
    ring = ()
    for i in tl.static_range(W - 1):
        place = place_of(first - 1 - i, places, b, slots, W, HAS_PLACES, HAS_INITIAL)
        ring = ring + (read_input(place, x, x_t, c_x, initial, C, c, c_ok, HAS_INITIAL).to(tl.float32),)

    for slot in range(first, tl.minimum(first + segment, slots), GROUP):
        at, inputs = (), ()
        for i in tl.static_range(GROUP):
            at = at + (place_of(slot + i, places, b, slots, W, HAS_PLACES, HAS_INITIAL),)
            inputs = inputs + (read_input(at[i], x, x_t, c_x, initial, C, c, c_ok, HAS_INITIAL),)
        for i in tl.static_range(GROUP):
            now = inputs[i].to(tl.float32)
            u = offset + taps[0] * now
            for w in tl.static_range(W - 1):
                u += taps[w + 1] * ring[w]
            if SILU:
                u = u * tl.sigmoid(u)
            if RESIDUAL:
                u += now
            tl.store(y + at[i] * C + c, u.to(y.dtype.element_ty), mask=c_ok & (at[i] + tl.zeros_like(c) >= 0))
            if W > 1:
                ring = push(ring, now, W - 1)
