# mypy: ignore-errors
"""Gradients of the reflections across heads and of the variances after them: each input is read once."""

import triton
import triton.language as tl

from linattn.kernels.reflection.device.tiles import (
    fold,
    load_normal,
    load_tokens,
    real_tokens,
    reflect,
    segment_of,
    store_tokens,
)


@triton.jit
def _backward_segment(
    x, g, dx, shares, normals, mask, center, inverse, d_variance, program, T, span,
    x_b, x_h, x_t, x_d, g_b, g_h, g_t, g_d, mask_b, mask_t,  # strides
    HAS_MASK: tl.constexpr, VARIANCE: tl.constexpr, BY_TOKEN: tl.constexpr, GROUP: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``z' = z - c s w``, ``s = z.w``, ``c = 2 / |w|^2``: with ``t = g.w``

    dz = g - c t w,  dw = sum over tokens of c^2 s t w - c (s g + t z).
    """
    b, start, end = segment_of(program, T, span)
    channel = tl.arange(0, BC)
    if R > 0:
        w0, c0, c0_grad = load_normal(normals, C, BC)
        products0, crossed0 = tl.zeros((BT,), tl.float32), tl.zeros((W, BC), tl.float32)
    if R > 1:
        w1, c1, c1_grad = load_normal(normals + C, C, BC)
        products1, crossed1 = tl.zeros((BT,), tl.float32), tl.zeros((W, BC), tl.float32)
    if VARIANCE:
        of_head = b * (C // D // GROUP) + channel // D // GROUP
        mean = tl.load(center + of_head * D + channel % D, mask=channel < C, other=0.0)
        weight = tl.load(d_variance + of_head * (D // 2) + channel % D // 2, mask=channel < C, other=0.0)
        weight *= tl.load(inverse + of_head, mask=channel < C, other=0.0)
    for t in tl.range(start, end, BT, num_stages=STAGES):
        row = t + tl.arange(0, BT)
        z = load_tokens(x + b * x_b, row, end, x_h, x_t, x_d, D, C, BC)
        grad = tl.zeros((BT, BC), tl.float32)
        if R > 0:
            grad = load_tokens(g + b * g_b, row, end, g_h, g_t, g_d, D, C, BC)
            z0 = z
            z, s0 = reflect(z0, w0, c0)
        if R > 1:
            z1 = z
            z, s1 = reflect(z1, w1, c1)
        if VARIANCE:
            real = real_tokens(mask, b, row, end, mask_b, mask_t, HAS_MASK)
            grad += tl.where(real[:, None], (z - mean[None, :]) * weight[None, :], 0.0)
        if R > 1:
            before = grad
            grad, t1 = reflect(before, w1, c1)
            products1 += s1 * t1
            crossed1 += fold(s1[:, None] * before + t1[:, None] * z1, W)
        if R > 0:
            before = grad
            grad, t0 = reflect(before, w0, c0)
            products0 += s0 * t0
            crossed0 += fold(s0[:, None] * before + t0[:, None] * z0, W)
        store_tokens(dx, grad, b, row, end, T, BY_TOKEN, D, C, BC)
    share = shares + program.to(tl.int64) * (R * C) + channel
    if R > 0:
        dw = tl.sum(products0, 0) * c0_grad * w0 - c0 * tl.sum(crossed0, 0)
        tl.store(share, dw, mask=channel < C)
    if R > 1:
        dw = tl.sum(products1, 0) * c1_grad * w1 - c1 * tl.sum(crossed1, 0)
        tl.store(share + C, dw, mask=channel < C)


@triton.jit(do_not_specialize=["Tq", "Tk", "programs_q", "span"])
def reflect_backward(
    q, k, gq, gk, dq, dk, shares, normals, mask, center, inverse, d_variance, programs_q, Tq, Tk, span,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, gq_b, gq_h, gq_t, gq_d, gk_b, gk_h, gk_t, gk_d, mask_b, mask_t,  # strides
    MASKS_Q: tl.constexpr, MASKS_K: tl.constexpr, VARIANCE: tl.constexpr,
    BY_TOKEN_Q: tl.constexpr, BY_TOKEN_K: tl.constexpr, GROUP: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, CQ: tl.constexpr, CK: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As the forward pass; gq, gk are the gradients of what it wrote, d_variance (B, H_kv, D/2) that of the variances.

    center (B, H_kv, D): means over tokens; inverse (B, H_kv): 1 over their number. Writes dq, dk, and what
    each program's tokens add to the gradient of the normals, shares (programs, R, C).
    """
    program = tl.program_id(0)
    if program < programs_q:
        _backward_segment(
            q, gq, dq, shares, normals, mask, center, inverse, d_variance, program, Tq, span,
            q_b, q_h, q_t, q_d, gq_b, gq_h, gq_t, gq_d, mask_b, mask_t,
            MASKS_Q, VARIANCE, BY_TOKEN_Q, GROUP, R, D, CQ, BT, BC, W, STAGES,
        )  # fmt: skip
    else:
        of_k = shares + programs_q.to(tl.int64) * (R * CK)
        _backward_segment(
            k, gk, dk, of_k, normals, mask, center, inverse, d_variance, program - programs_q, Tk, span,
            k_b, k_h, k_t, k_d, gk_b, gk_h, gk_t, gk_d, mask_b, mask_t,
            MASKS_K, VARIANCE, BY_TOKEN_K, 1, R, D, CK, BT, BC, W, STAGES,
        )  # fmt: skip
