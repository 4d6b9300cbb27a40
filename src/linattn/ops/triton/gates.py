"""Exponential gates as a decay: the running maximum in one launch, equal to :mod:`linattn.ops.stabilizer`."""

import torch
from torch import Tensor

from linattn.ops.prepare import STRONGEST_DECAY
from linattn.ops.stabilizer import Stabilized, stabilize
from linattn.ops.triton.support import reason_against

# Tokens of one scan; a longer sequence is walked in blocks of them.
_LONGEST_BLOCK = 1024


def stabilize_gates(
    log_input: Tensor,
    log_decay: Tensor,
    initial_log_scale: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Stabilized:
    """:func:`linattn.ops.stabilizer.stabilize` with ``log_decay`` and ``log_gain`` in fp32, as kernels want them.

    ``m_t = max(m_{t-1} + f_t, i_t)``, ``log_decay_t = f_t + m_{t-1} - m_t``, ``log_gain_t = i_t - m_t``.

    log_input i and log_decay f ``(B, H, T)``, -inf allowed; initial_log_scale ``(N, H)``. ``log_scale (B, H, T)`` and
    ``final_log_scale (N, H)`` are fp64 and constants. Where kernels cannot run, plain PyTorch computes the same.
    """
    if reason_against(log_input.float()) or log_input.numel() == 0:
        found = stabilize(log_input, log_decay, initial_log_scale, cu_seqlens)
        return found._replace(log_decay=found.log_decay.float(), log_gain=found.log_gain.float())
    start = None if initial_log_scale is None else initial_log_scale.double()
    return Stabilized(*triton_gates(log_input, log_decay, start, cu_seqlens))


@torch.library.custom_op("linattn::triton_gates", mutates_args=())
def triton_gates(
    log_input: Tensor, log_decay: Tensor, start: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decay and gain (fp32), running maximum and its last value in each sequence (fp64)."""
    from linattn.ops.triton.kernels.gates_running import running_gates

    decay, gain, scale, last = _results(log_input, cu_seqlens)
    _, H, T = log_input.shape
    device = log_input.device
    with torch.cuda.device(device.index if device.type == "cuda" else -1):
        running_gates[(last.numel(),)](
            log_input, *log_input.stride(), log_decay, *log_decay.stride(),
            None if cu_seqlens is None else cu_seqlens.contiguous(), None if start is None else start.contiguous(),
            decay, gain, scale, last, T, H,
            BLOCK=min(_LONGEST_BLOCK, 1 << max(4, (T - 1).bit_length())), PACKED=cu_seqlens is not None,
            START=start is not None, STRONGEST=STRONGEST_DECAY, num_warps=4,
        )  # fmt: skip
    return decay, gain, scale, last


@triton_gates.register_fake
def _(log_input, log_decay, start, cu_seqlens):  # type: ignore[no-untyped-def]
    return _results(log_input, cu_seqlens)


def _results(log_input: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = log_input.shape
    sequences = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    decay, gain = (torch.empty(shape, dtype=torch.float32, device=log_input.device) for _ in range(2))
    return decay, gain, decay.new_empty(shape, dtype=torch.float64), decay.new_empty(
        sequences, shape[1], dtype=torch.float64
    )  # fmt: skip


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    log_input, log_decay, start, cu_seqlens = inputs
    ctx.save_for_backward(*output[:2], cu_seqlens)
    ctx.dtypes = log_input.dtype, log_decay.dtype
    ctx.has_start = start is not None
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_decay, d_gain, d_scale, d_last):  # type: ignore[no-untyped-def]
    """The maximum cancels from whatever is computed in its units: it counts as a constant, except where it starts."""
    decay, gain, cu_seqlens = ctx.saved_tensors
    d_input = d_forget = d_start = None
    if d_gain is not None:
        d_input = d_gain.masked_fill(gain <= STRONGEST_DECAY, 0).to(ctx.dtypes[0])
    if d_decay is not None:
        d_decay = d_decay.masked_fill(decay <= STRONGEST_DECAY, 0)
        d_forget = d_decay.to(ctx.dtypes[1])
        if ctx.has_start:
            d_start = _at_first(d_decay, cu_seqlens).double()
    return d_input, d_forget, d_start, None


def _at_first(d_decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Of the first token of each sequence, ``(N, H)``; 0 where it has none."""
    if cu_seqlens is None:
        return d_decay[:, :, 0]
    first = d_decay[0].index_select(1, cu_seqlens[:-1].clamp(max=d_decay.shape[2] - 1)).t()
    return first.masked_fill((cu_seqlens[1:] == cu_seqlens[:-1])[:, None], 0)


triton_gates.register_autograd(_gradients, setup_context=_remember)
