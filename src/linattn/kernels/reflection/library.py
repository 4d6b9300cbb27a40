"""Reflections across heads and variances over tokens as operators of torch's library."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.kernels.common.direct import shortest
from linattn.kernels.common.gradients import or_zeros
from linattn.kernels.common.launching import launch
from linattn.kernels.common.layout import is_token_major, like_tokens
from linattn.kernels.common.replaying import replayed
from linattn.ops.shared.call import refuse_second_derivatives

# Numbers of a tile for each of its 256 threads: few enough that two programs fit a multiprocessor. Tiles are loaded
# ahead by one less than the stages; backward loads two tiles at a time.
PER_THREAD, PER_THREAD_BACKWARD, WARPS = 16, 16, 8
STAGES, STAGES_BACKWARD = 4, 3
THREADS = 32 * WARPS
WIDEST = THREADS * PER_THREAD_BACKWARD  # most channels of a token: a tile holds at least one token
POOLED = 16  # segments that are merged at once
ENOUGH = 1024  # programs that keep a device busy; beyond that each program takes more tokens
LONGEST = 16  # most tiles of a program


class Walk(NamedTuple):
    """Tokens and padded channels of a tile, rows that its threads keep apart, tokens of a program, programs of q, k."""

    BT: int
    BC: int
    W: int
    span: int
    of_q: int
    of_k: int


def walk_for(q: Tensor, k: Tensor, per_thread: int) -> Walk:
    BC = max(16, 1 << (max(x.shape[1] * x.shape[3] for x in (q, k)) - 1).bit_length())
    B, lengths = q.shape[0], (q.shape[2], k.shape[2])
    BT = max(1, min(THREADS * per_thread // BC, 1 << (max(lengths) - 1).bit_length()))
    # A thread loads 16 bytes of a row, and next those of the row that follows the last row of all threads.
    W = max(1, min(BT, THREADS * (16 // q.element_size()) // BC))
    tiles = min(LONGEST, max(1, B * sum(-(-T // BT) for T in lengths) // ENOUGH))
    span = tiles * BT
    return Walk(BT, BC, W, span, *(B * -(-T // span) for T in lengths))


def _forward(
    q: Tensor, k: Tensor, normals: Tensor, key_mask: Tensor | None, variance: bool, wide: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q and k reflected (empty without normals), variances ``(B, H_kv, D/2)``, means ``(B, H_kv, D)``, 1 / counts.

    q ``(B, H, Tq, D)``, k ``(B, H_kv, Tk, D)``, normals ``(R, H D)``; ``wide``: y in fp32. Results that are not asked
    for are empty.
    """
    outputs = _outputs(q, k, normals, variance, wide)
    launch_forward(q, k, normals, key_mask, variance, *outputs)
    return outputs


def _backward(
    gq: Tensor, gk: Tensor, d_variance: Tensor, q: Tensor, k: Tensor, normals: Tensor, key_mask: Tensor | None,
    center: Tensor, inverse: Tensor, variance: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and the normals."""
    dq, dk = (like_tokens(x, x.shape[3]) for x in (q, k))
    shares = launch_backward(
        gq, gk, d_variance.contiguous(), q, k, normals, key_mask, center, inverse, variance, dq, dk
    )
    return dq, dk, shares.sum(0).to(normals.dtype)


_forward = replayed(_forward)
reflected = torch.library.custom_op("linattn::triton_reflect_heads", _forward, mutates_args=())
reflected_backward = torch.library.custom_op("linattn::triton_reflect_heads_backward", _backward, mutates_args=())


@reflected.register_fake
def _(q, k, normals, key_mask, variance, wide):  # type: ignore[no-untyped-def]
    return _outputs(q, k, normals, variance, wide)


@reflected_backward.register_fake
def _(gq, gk, d_variance, q, k, normals, key_mask, center, inverse, variance):  # type: ignore[no-untyped-def]
    return like_tokens(q, q.shape[3]), like_tokens(k, k.shape[3]), normals.new_empty(normals.shape)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, normals, key_mask, ctx.variance, _ = inputs
    ctx.save_for_backward(q, k, normals, key_mask, *output[3:])
    ctx.mark_non_differentiable(*output[3:])
    # The gradient of an unused output is None rather than a tensor of zeros, which would be read.
    ctx.set_materialize_grads(False)


def _gradients(ctx, gq, gk, d_variance, *unused, run=reflected_backward):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns them only once
    q, k, *_, center, _ = saved
    gq, gk = or_zeros(gq, q), or_zeros(gk, k)
    varies = ctx.variance and d_variance is not None
    return *run(gq, gk, d_variance if varies else center, *saved, varies), None, None, None


reflected.register_autograd(_gradients, setup_context=_remember)
refuse_second_derivatives(reflected_backward, "kernels")
reflect_directly = shortest(reflected, _forward, _backward, _remember, _gradients)


def launch_forward(
    q: Tensor, k: Tensor, normals: Tensor, key_mask: Tensor | None, variance: bool,
    yq: Tensor, yk: Tensor, variances: Tensor, center: Tensor, inverse: Tensor,
) -> None:  # fmt: skip
    from linattn.kernels.reflection.device.forward import reflect_forward
    from linattn.kernels.reflection.device.pool import pool_moments

    walk, B, D = walk_for(q, k, PER_THREAD), q.shape[0], q.shape[3]
    counts, moments = [yq, yk], [yq, yk]  # pointers that are not read
    if variance:
        counts = [q.new_empty(n, dtype=torch.float32) for n in (walk.of_q, walk.of_k)]
        moments = [n.new_empty((n.shape[0], 2, x.shape[1], D)) for x, n in zip((q, k), counts, strict=True)]
    mask, strides, constants = _shared(q, k, normals, key_mask, variance, walk)
    launch(
        reflect_forward, walk.of_q + walk.of_k,
        q, k, yq, yk, normals.contiguous(), mask, *moments, *counts, walk.of_q, q.shape[2], k.shape[2], walk.span,
        *q.stride(), *k.stride(), *strides, **constants, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    if variance:
        H, G = q.shape[1], k.shape[1]
        launch(
            pool_moments, B * G, *moments, *counts, center, inverse, variances, walk.of_q // B, walk.of_k // B,
            H=H, GROUP=H // G, D=D, BD=max(2, 1 << (D - 1).bit_length()), BN=POOLED, num_warps=4,
        )  # fmt: skip


def launch_backward(
    gq: Tensor, gk: Tensor, d_variance: Tensor, q: Tensor, k: Tensor, normals: Tensor, key_mask: Tensor | None,
    center: Tensor, inverse: Tensor, variance: bool, dq: Tensor, dk: Tensor,
) -> Tensor:  # fmt: skip
    """Fill dq and dk; return what each program adds to the gradient of the normals, ``(programs, R, H D)``."""
    from linattn.kernels.reflection.device.backward import reflect_backward

    walk = walk_for(q, k, PER_THREAD_BACKWARD)
    programs = walk.of_q + walk.of_k
    shares = normals.new_empty((programs, *normals.shape), dtype=torch.float32)
    mask, strides, constants = _shared(q, k, normals, key_mask, variance, walk)
    gradients = (gq, gk) if normals.shape[0] else (q, k)  # without normals only the variance has a gradient
    launch(
        reflect_backward, programs,
        q, k, *gradients, dq, dk, shares, normals.contiguous(), mask, center, inverse, d_variance,
        walk.of_q, q.shape[2], k.shape[2], walk.span,
        *q.stride(), *k.stride(), *gradients[0].stride(), *gradients[1].stride(), *strides,
        **constants, GROUP=q.shape[1] // k.shape[1], STAGES=STAGES_BACKWARD, num_warps=WARPS,
    )  # fmt: skip
    return shares


def _shared(
    q: Tensor, k: Tensor, normals: Tensor, key_mask: Tensor | None, variance: bool, walk: Walk
) -> tuple[Tensor, tuple[int, ...], dict[str, Any]]:
    """The mask, its strides and the constants of both passes. If lengths of q and k differ, all queries are real."""
    masked = key_mask is not None
    constants = {
        "MASKS_Q": masked and q.shape[2] == k.shape[2], "MASKS_K": masked, "VARIANCE": variance,
        "BY_TOKEN_Q": is_token_major(q), "BY_TOKEN_K": is_token_major(k),
        "R": normals.shape[0], "D": q.shape[3], "CQ": q.shape[1] * q.shape[3], "CK": k.shape[1] * k.shape[3],
        "BT": walk.BT, "BC": walk.BC, "W": walk.W,
    }  # fmt: skip
    return (normals, (0, 0), constants) if key_mask is None else (key_mask, key_mask.stride(), constants)


def _outputs(
    q: Tensor, k: Tensor, normals: Tensor, variance: bool, wide: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, G, _, D = k.shape
    dtypes = [torch.float32 if wide else x.dtype for x in (q, k)]
    ys = [
        like_tokens(x, D, dtype) if normals.shape[0] else x.new_empty(0, dtype=dtype)
        for x, dtype in zip((q, k), dtypes, strict=True)
    ]
    shapes = ((B, G, D // 2), (B, G, D), (B, G)) if variance else ((0,), (0,), (0,))
    variances, center, inverse = (q.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return ys[0], ys[1], variances, center, inverse
