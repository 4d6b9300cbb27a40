"""The convolution kernels as operators of torch's library."""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.kernels.common.direct import shortest
from linattn.kernels.common.launching import launch
from linattn.ops.shared.call import refuse_second_derivatives


class Walk(NamedTuple):
    """Channels of a program, slots that are loaded at the same time, slots of a program, warps."""

    channels: int
    group: int
    segment: int
    warps: int


def walk_for(C: int, slots: int, W: int, rows: int, backward: bool) -> Walk:
    """The walk with one warp per program: each thread has its own channels, nothing is exchanged, many programs fit.

    Long segments mean fewer partial sums and fewer slots walked twice, short ones enough programs for the device.
    """
    channels = min(128, max(32, 1 << (C - 1).bit_length()))
    blocks = -(-C // channels) * rows
    group, segment = 8, 256
    while segment > 32 and blocks * -(-slots // segment) < 4096:
        segment //= 2
    # The backward pass walks W-1 slots into the next segment: with them a segment fills whole groups.
    return Walk(channels, group, segment - (W - 1) if backward else segment, 1)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, places: Tensor | None,
    residual: bool, silu: bool, masked: bool, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The output ``y (B, T, C)``. With ``masked`` the table of places leaves tokens out; their outputs are 0."""
    y = (torch.zeros if masked else torch.empty)(x.shape, dtype=out_dtype, device=x.device)
    if y.numel():
        launch_forward(x, weight, bias, initial, places, residual, silu, y)
    return y


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, places: Tensor | None,
    residual: bool, silu: bool, masked: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, bias and initial (the last two are empty if there is none)."""
    C, W = weight.shape
    dx = (torch.zeros if masked else torch.empty)(x.shape, dtype=x.dtype, device=x.device)
    d_initial = _like_or_nothing(initial, x)
    if dx.numel():
        sums = launch_backward(dy, x, weight, bias, initial, places, residual, silu, dx, d_initial).sum(0)
    else:
        d_initial.zero_()
        sums = torch.zeros(W + 1, C, dtype=torch.float32, device=x.device)
    d_weight = sums[:W].t().to(weight.dtype).contiguous()
    d_bias = x.new_empty(0) if bias is None else sums[W].to(bias.dtype, copy=True)
    return dx, d_weight, d_bias, d_initial


convolution = torch.library.custom_op("linattn::triton_convolution", _forward, mutates_args=())
convolution_backward = torch.library.custom_op("linattn::triton_convolution_backward", _backward, mutates_args=())


@convolution.register_fake
def _(x, weight, bias, initial, places, residual, silu, masked, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=out_dtype)


@convolution_backward.register_fake
def _(dy, x, weight, bias, initial, *options):  # type: ignore[no-untyped-def]
    d_weight = weight.new_empty(weight.shape)
    return x.new_empty(x.shape), d_weight, _like_or_nothing(bias, x), _like_or_nothing(initial, x)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, residual, silu, masked, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = residual, silu, masked


def _gradients(ctx, dy, run=convolution_backward):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns them only once
    _, _, bias, initial, _ = saved
    dx, d_weight, d_bias, d_initial = run(dy, *saved, *ctx.options)
    absent = None, None, None, None, None
    return dx, d_weight, None if bias is None else d_bias, None if initial is None else d_initial, *absent


convolution.register_autograd(_gradients, setup_context=_remember)
refuse_second_derivatives(convolution_backward, "kernels")
convolve_directly = shortest(convolution, _forward, _backward, _remember, _gradients)


@torch.library.custom_op("linattn::triton_convolution_step", mutates_args=())
def convolution_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    residual: bool, silu: bool, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output ``y (B, C)`` of one token and the next state ``(B, W-1, C)``, without a gradient."""
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    following = torch.empty(x.shape[0], weight.shape[1] - 1, x.shape[1], dtype=x.dtype, device=x.device)
    launch_step(x, weight, bias, state, residual, silu, y, following)
    return y, following


@torch.library.custom_op("linattn::triton_convolution_step_", mutates_args=("state",))
def convolution_step_in_place(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor,
    residual: bool, silu: bool, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The output ``y (B, C)`` of one token; the state is overwritten by the next one."""
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    launch_step(x, weight, bias, state, residual, silu, y, state)
    return y


@convolution_step.register_fake
def _(x, weight, bias, state, residual, silu, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[1])


@convolution_step_in_place.register_fake
def _(x, weight, bias, state, residual, silu, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=out_dtype)


def launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, places: Tensor | None,
    residual: bool, silu: bool, y: Tensor, walk: Walk | None = None,
) -> None:  # fmt: skip
    from linattn.kernels.convolution.device.forward import convolve_forward

    (B, T, C), W = x.shape, weight.shape[1]
    initial = _rows(initial, W)
    slots = T + W - 1 if places is None else places.shape[1]
    walk = walk or walk_for(C, slots, W, B, backward=False)
    segments, blocks = -(-slots // walk.segment), -(-C // walk.channels)
    launch(
        convolve_forward, blocks * segments * B,
        x, weight, weight if bias is None else bias.contiguous(), _or(initial, x), _or(places, x), y,
        T, C, slots, segments, walk.segment,
        *x.stride(), *weight.stride(),
        W=W, HAS_BIAS=bias is not None, HAS_INITIAL=initial is not None, HAS_PLACES=places is not None,
        SILU=silu, RESIDUAL=residual, BLOCK_C=walk.channels, GROUP=walk.group, num_warps=walk.warps,
    )  # fmt: skip


def launch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, places: Tensor | None,
    residual: bool, silu: bool, dx: Tensor, d_initial: Tensor, walk: Walk | None = None,
) -> Tensor:  # fmt: skip
    """Fill dx and d_initial; return each program's share of d_weight and, last, d_bias, ``(programs, W + 1, C)``."""
    from linattn.kernels.convolution.device.backward import convolve_backward

    (B, T, C), W = x.shape, weight.shape[1]
    initial = _rows(initial, W)
    slots = T + W - 1 if places is None else places.shape[1]
    walk = walk or walk_for(C, slots, W, B, backward=True)
    segments, blocks = -(-slots // walk.segment), -(-C // walk.channels)
    partial = torch.empty(B * segments, W + 1, C, dtype=torch.float32, device=x.device)
    launch(
        convolve_backward, blocks * segments * B,
        dy, x, weight, weight if bias is None else bias.contiguous(), _or(initial, x), _or(places, x),
        dx, d_initial, partial,
        T, C, slots, segments, walk.segment,
        *dy.stride(), *x.stride(), *weight.stride(),
        W=W, HAS_BIAS=bias is not None, HAS_INITIAL=initial is not None, HAS_PLACES=places is not None,
        SILU=silu, RESIDUAL=residual, BLOCK_C=walk.channels, GROUP=walk.group, num_warps=walk.warps,
    )  # fmt: skip
    return partial


def launch_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    residual: bool, silu: bool, y: Tensor, following: Tensor,
) -> None:  # fmt: skip
    from linattn.kernels.convolution.device.step import convolve_step

    B, C = x.shape
    if y.numel() == 0:
        return
    launch(
        convolve_step, B * -(-C // 256),
        x, weight, weight if bias is None else bias.contiguous(), following if state is None else state, y, following,
        C, *x.stride(), *weight.stride(), *(following if state is None else state).stride(), *following.stride(),
        W=weight.shape[1], HAS_BIAS=bias is not None, HAS_STATE=state is not None, SILU=silu, RESIDUAL=residual,
        BLOCK_C=256, num_warps=2,
    )  # fmt: skip


def _rows(initial: Tensor | None, W: int) -> Tensor | None:
    """``initial`` as the kernels read it, with rows without gaps; None if the window is one token and has no past."""
    return None if initial is None or W == 1 else initial.contiguous()


def _or(tensor: Tensor | None, unread: Tensor) -> Tensor:
    """The tensor, or another one for a pointer that the kernel does not read."""
    return unread if tensor is None else tensor


def _like_or_nothing(tensor: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0) if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)
