# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton adds tuples, but does not unpack them)
"""One token of the short convolution: output and next state.

x         (B, C) through strides, weight (C, W) through strides, bias (C,)
state     (B, W-1, C) through strides, oldest input first
y         (B, C) contiguous
following (B, W-1, C) through strides, or state itself: a program owns its channels, and a thread writes an input
          only after all inputs were read
"""

import triton
import triton.language as tl


@triton.jit
def convolve_step(
    x, weight, bias, state, y, following,
    C, x_b, x_c, weight_c, weight_w, state_b, state_w, state_c, following_b, following_w, following_c,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    b = pid // blocks
    c = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_ok = c < C
    now = tl.load(x + b * x_b + c * x_c, mask=c_ok, other=0)
    u = tl.load(weight + c * weight_c + (W - 1) * weight_w, mask=c_ok, other=0).to(tl.float32) * now.to(tl.float32)
    past = ()
    for w in tl.static_range(W - 1):
        if HAS_STATE:
            past = past + (tl.load(state + b * state_b + w * state_w + c * state_c, mask=c_ok, other=0),)
        else:
            past = past + (tl.zeros([BLOCK_C], tl.float32),)
    for w in tl.static_range(W - 1):
        tap = tl.load(weight + c * weight_c + w * weight_w, mask=c_ok, other=0).to(tl.float32)
        u += tap * past[w].to(tl.float32)
    if HAS_BIAS:
        u += tl.load(bias + c, mask=c_ok, other=0).to(tl.float32)
    if SILU:
        u = u * tl.sigmoid(u)
    if RESIDUAL:
        u += now.to(tl.float32)
    tl.store(y + b * C + c, u.to(y.dtype.element_ty), mask=c_ok)
    if W > 1:
        # Fewer channels than threads: a channel is held by several, and all must have read before one writes.
        tl.debug_barrier()
        following += b * following_b + c * following_c
        for w in tl.static_range(W - 2):
            tl.store(following + w * following_w, past[w + 1].to(following.dtype.element_ty), mask=c_ok)
        tl.store(following + (W - 2) * following_w, now.to(following.dtype.element_ty), mask=c_ok)
