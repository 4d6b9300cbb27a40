"""The matrices of pairs of channels as an operator of torch's library."""

import torch
from torch import Tensor

from linattn.kernels.common.direct import shortest
from linattn.kernels.common.launching import launch as launch_kernel
from linattn.kernels.common.replaying import replayed
from linattn.ops.shared.call import refuse_second_derivatives

ROWS, COLUMNS = 8, 64  # of the batch, and pairs, of one program


def _forward(
    variance: Tensor | None, angles: Tensor, amplitude: Tensor | None, gain: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The matrices ``(B, H, 2, D)``, from variance ``(B, H, D/2)`` (None: B is 1), angles ``(R, H, D/2)``, R 1 or 2."""
    table = _table(variance, angles)
    launch(variance, angles, (amplitude, gain, bias), table)
    return table


def _backward(
    d_table: Tensor, variance: Tensor | None, angles: Tensor,
    amplitude: Tensor | None, gain: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients in the order of the inputs; empty for absent ones."""
    d_variance = _like_or_nothing(variance, angles)
    sums = launch(variance, angles, (amplitude, gain, bias), d_table.contiguous(), d_variance).sum(0)
    last, *others = sums.unflatten(1, angles.shape[1:]).to(angles.dtype, copy=True).unbind()
    d_angles = torch.stack([last] if angles.shape[0] == 1 else [-last, last])
    d_amplitude, d_gain, d_bias = (
        angles.new_empty(0) if x is None else d.to(x.dtype, copy=True)
        for x, d in zip((amplitude, gain, bias), others, strict=True)
    )
    return d_variance, d_angles, d_amplitude, d_gain, d_bias


_forward = replayed(_forward)
pair_table = torch.library.custom_op("linattn::triton_pair_table", _forward, mutates_args=())
pair_table_backward = torch.library.custom_op("linattn::triton_pair_table_backward", _backward, mutates_args=())


@pair_table.register_fake
def _(variance, angles, amplitude, gain, bias):  # type: ignore[no-untyped-def]
    return _table(variance, angles)


@pair_table_backward.register_fake
def _(d_table, variance, angles, amplitude, gain, bias):  # type: ignore[no-untyped-def]
    own = [_like_or_nothing(x, angles) for x in (variance, amplitude, gain, bias)]
    return own[0], angles.new_empty(angles.shape), *own[1:]


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _gradients(ctx, d_table, run=pair_table_backward):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns them only once
    found = run(d_table, *saved)
    return tuple(None if x is None else g for x, g in zip(saved, found, strict=True))


pair_table.register_autograd(_gradients, setup_context=_remember)
refuse_second_derivatives(pair_table_backward, "kernels")
pair_table_directly = shortest(pair_table, _forward, _backward, _remember, _gradients)


def launch(
    variance: Tensor | None, angles: Tensor, modulation: tuple[Tensor | None, ...], table: Tensor,
    d_variance: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fill the table, or with ``d_variance`` fill that from the table's gradient and return ``(blocks, 4, H D/2)``.

    The latter is what each block of the batch adds to the gradients of the last angle, amplitude, gain and bias.
    """
    from linattn.kernels.reflection.device.pairs import pair_backward, pair_forward

    (R, H, half), B = angles.shape, table.shape[0]
    P, blocks = H * half, -(-B // ROWS)
    programs = blocks * -(-P // COLUMNS)
    inputs = [angles if x is None else x.contiguous() for x in (variance, angles, *modulation)]
    constants = {"HAS_VARIANCE": variance is not None, "R": R, "D": 2 * half, "BB": ROWS, "BP": COLUMNS}
    if d_variance is None:
        launch_kernel(pair_forward, programs, *inputs, table, B, P, **constants, num_warps=4)
        return table
    shares = angles.new_empty((blocks, 4, P), dtype=torch.float32)
    launch_kernel(pair_backward, programs, *inputs, table, d_variance, shares, B, P, **constants, num_warps=4)
    return shares


def _table(variance: Tensor | None, angles: Tensor) -> Tensor:
    _, H, half = angles.shape
    B = 1 if variance is None else variance.shape[0]
    return angles.new_empty((B, H, 2, 2 * half), dtype=torch.float32)


def _like_or_nothing(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x.new_empty(x.shape)
