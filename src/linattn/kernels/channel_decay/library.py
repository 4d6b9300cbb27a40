"""Attention with a decay per channel as operators of torch's library; kernels are imported when one first runs."""

import torch
from torch import Tensor

from linattn.kernels.causal.widths import reachable, reachable_gradient
from linattn.kernels.common.direct import shortest
from linattn.kernels.common.replaying import replayed
from linattn.ops.shared.call import refuse_second_derivatives


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, kv: Tensor | None, z: Tensor | None, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, normalizer: int, eps: float, shift: bool, need_state: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, row sums (empty without a normaliser), final state kv and z (empty unless needed).

    ``log_decay`` may have any values, also -inf; those of masked tokens are not read.

    ``shift``: token t is decayed by the decay of token t - 1 (decay_index "key"); the returned state is then without
    the decay of the last token.
    """
    from linattn.kernels.channel_decay.device import launch
    from linattn.kernels.channel_decay.device.plan import Inputs

    inputs = Inputs(_rows(q), _rows(k), _rows(v), _rows(log_decay), _bytes(key_mask), cu_seqlens, shift)
    return launch.forward(inputs, kv, z, normalizer, eps, dtype, need_state)


def _backward(
    d_o: Tensor, d_kv: Tensor | None, d_z: Tensor | None, o: Tensor, den: Tensor, kv_1: Tensor, z_1: Tensor,
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, kv: Tensor | None, z: Tensor | None, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, normalizer: int, eps: float, shift: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_decay and the initial state (empty where there is none)."""
    from linattn.kernels.channel_decay.device import launch
    from linattn.kernels.channel_decay.device.plan import Inputs

    inputs = Inputs(_rows(q), _rows(k), _rows(v), _rows(log_decay), _bytes(key_mask), cu_seqlens, shift)
    d_kv, d_z = (None if t is None else t.contiguous() for t in (d_kv, d_z))
    d_o = _rows(reachable_gradient(d_o))
    return launch.backward(inputs, kv, z, o, den, kv_1, z_1, d_o, d_kv, d_z, normalizer, eps)


_forward, _backward = replayed(_forward), replayed(_backward)
channel_decay = torch.library.custom_op("linattn::triton_channel_decay", _forward, mutates_args=())
channel_decay_backward = torch.library.custom_op("linattn::triton_channel_decay_backward", _backward, mutates_args=())


@channel_decay.register_fake
def _(q, k, v, log_decay, kv, z, key_mask, cu_seqlens, normalizer, eps, shift, need_state, dtype):  # type: ignore[no-untyped-def]
    o = q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)
    den = q.new_empty(q.shape[:3] if normalizer else (0,), dtype=torch.float32)
    if not need_state:
        return o, den, q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)
    sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = sequences, k.shape[1], k.shape[3]
    return o, den, q.new_empty(*shape, v.shape[3], dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


@channel_decay_backward.register_fake
def _(d_o, d_kv, d_z, o, den, kv_1, z_1, q, k, v, log_decay, kv, z, *options):  # type: ignore[no-untyped-def]
    states = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (kv, z)) if kv is not None else (
        q.new_empty(0, dtype=torch.float32) for _ in range(2))  # fmt: skip
    gradients = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, log_decay))
    return *gradients, *states


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, normalizer, eps, shift, need_state, _ = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.options = normalizer, eps, shift
    ctx.need_state = need_state


def _gradients(ctx, d_o, d_den, d_kv, d_z, run=channel_decay_backward):  # type: ignore[no-untyped-def]
    if not ctx.need_state:
        d_kv = d_z = None
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns them only once
    *found, d_kv_0, d_z_0 = run(d_o, d_kv, d_z, *saved, *ctx.options)
    starts = (None, None) if saved[8] is None else (d_kv_0, d_z_0)
    return *found, *starts, *(None,) * 7


channel_decay.register_autograd(_gradients, setup_context=_remember)
refuse_second_derivatives(channel_decay_backward, "kernels")
channel_decay_directly = shortest(channel_decay, _forward, _backward, _remember, _gradients)


def _rows(x: Tensor) -> Tensor:
    """x with contiguous channels: kernels are compiled for the distance of two tokens, which must not be a length."""
    return reachable(x if x.stride(3) == 1 else x.contiguous())


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)
