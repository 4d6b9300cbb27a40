# mypy: ignore-errors
"""Reflections across heads, and what a segment of tokens adds to the variances: each input is read once."""

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
def _forward_segment(
    x, y, normals, mask, moments, counts, program, T, span,
    x_b, x_h, x_t, x_d, mask_b, mask_t,  # strides
    HAS_MASK: tl.constexpr, VARIANCE: tl.constexpr, BY_TOKEN: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A variance is merged from those of W slots of rows, each of which is a running mean and sum of squares."""
    b, start, end = segment_of(program, T, span)
    channel = tl.arange(0, BC)
    if R > 0:
        w0, twice0, _unused = load_normal(normals, C, BC)
    if R > 1:
        w1, twice1, _unused = load_normal(normals + C, C, BC)
    if VARIANCE:
        number = tl.zeros((W,), tl.float32)
        mean, squares = tl.zeros((W, BC), tl.float32), tl.zeros((W, BC), tl.float32)
    for t in tl.range(start, end, BT, num_stages=STAGES):
        row = t + tl.arange(0, BT)
        z = load_tokens(x + b * x_b, row, end, x_h, x_t, x_d, D, C, BC)
        if R > 0:
            z, _along = reflect(z, w0, twice0)
        if R > 1:
            z, _along = reflect(z, w1, twice1)
        if R > 0:
            store_tokens(y, z, b, row, end, T, BY_TOKEN, D, C, BC)
        if VARIANCE:
            real = real_tokens(mask, b, row, end, mask_b, mask_t, HAS_MASK)
            more = tl.sum(tl.reshape(real.to(tl.float32), (BT // W, W)), 0)
            # Padding may hold NaN, so it is left out and not multiplied by 0.
            here = fold(tl.where(real[:, None], z, 0.0), W) / tl.maximum(more, 1.0)[:, None]
            away = tl.reshape(z, (BT // W, W, BC)) - here[None, :, :]
            away = tl.where(real[:, None], tl.reshape(away, (BT, BC)), 0.0)
            share = more / tl.maximum(number + more, 1.0)
            apart = here - mean
            squares += fold(away * away, W) + apart * apart * (number * share)[:, None]
            mean += apart * share[:, None]
            number += more
    if VARIANCE:
        total = tl.sum(number, 0)
        center = tl.sum(mean * number[:, None], 0) / tl.maximum(total, 1.0)
        apart = mean - center[None, :]
        at = moments + program.to(tl.int64) * (2 * C) + channel
        tl.store(at, center, mask=channel < C)
        tl.store(at + C, tl.sum(squares + apart * apart * number[:, None], 0), mask=channel < C)
        tl.store(counts + program, total)


@triton.jit(do_not_specialize=["Tq", "Tk", "programs_q", "span"])
def reflect_forward(
    q, k, yq, yk, normals, mask, moments_q, moments_k, counts_q, counts_k, programs_q, Tq, Tk, span,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, mask_b, mask_t,  # strides
    MASKS_Q: tl.constexpr, MASKS_K: tl.constexpr, VARIANCE: tl.constexpr,
    BY_TOKEN_Q: tl.constexpr, BY_TOKEN_K: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, CQ: tl.constexpr, CK: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q (B, H, Tq, D), k (B, H_kv, Tk, D) -> yq, yk of their shapes; a program does ``span`` tokens of one.

    normals (R, C): reflections one after the other. moments (B, segments, 2, C): mean of a segment's real tokens after
    them, and sum of squares about it; counts (B, segments): how many these are. Programs of q come first.
    """
    program = tl.program_id(0)
    if program < programs_q:
        _forward_segment(
            q, yq, normals, mask, moments_q, counts_q, program, Tq, span, q_b, q_h, q_t, q_d, mask_b, mask_t,
            MASKS_Q, VARIANCE, BY_TOKEN_Q, R, D, CQ, BT, BC, W, STAGES,
        )  # fmt: skip
    else:
        _forward_segment(
            k, yk, normals, mask, moments_k, counts_k, program - programs_q, Tk, span,
            k_b, k_h, k_t, k_d, mask_b, mask_t,
            MASKS_K, VARIANCE, BY_TOKEN_K, R, D, CK, BT, BC, W, STAGES,
        )  # fmt: skip
