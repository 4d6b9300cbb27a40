"""A decoding step with an exponential gate: from gates to the next state in one kernel.

The backward pass is that of a step of linear attention, in plain PyTorch: the gates are factors of its keys and its
decay, and the unit is a factor of its queries, which is a constant in gradients, as all units are.
"""

import torch
from torch import Tensor

from linattn.kernels.common.direct import is_traced
from linattn.kernels.common.launching import launch
from linattn.kernels.common.replaying import replayed
from linattn.kernels.common.support import padded
from linattn.kernels.step.attend import gradients, tiles_for
from linattn.ops.exponential.call import ExponentialCall, ExponentialOutput, ExponentialState

# Bounds of m in the factor on the queries: e^60 leaves fp32 room for sums of 1e12, e^-80 is a normal number.
UNIT = -80.0, 60.0


def attend_step(call: ExponentialCall, scale: float, out_dtype: torch.dtype) -> ExponentialOutput:
    """Output ``(B, H, 1, V)`` and a new state; ``scale`` is the factor on q."""
    kv = z = unit = None
    if call.initial_state is not None:
        kv, z, unit = call.initial_state
        kv, z = kv.float(), z.float()
    inputs = call.q, call.k, call.v, call.log_input, call.log_decay, kv, z, unit, float(scale), out_dtype
    # Past the dispatcher, which takes longer than the kernel.
    run = exponential_step if torch.is_grad_enabled() or is_traced(inputs) else _forward
    output, kv, z, unit = run(*inputs)
    return ExponentialOutput(output, ExponentialState(kv, z, unit.detach() if unit.requires_grad else unit))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_input: Tensor, log_decay: Tensor,
    kv: Tensor | None, z: Tensor | None, unit: Tensor | None, scale: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, and the next state with its unit. A single token: ``q (B, H, 1, K)``, ``log_input (B, H_kv, 1)``."""
    from linattn.kernels.exponential.device.step import exponential_step as kernel

    (B, H, _, K), H_kv, V = q.shape, k.shape[1], v.shape[3]
    output = torch.empty(B, H, 1, V, dtype=out_dtype, device=q.device)
    state = [torch.empty(B, H_kv, *size, dtype=torch.float32, device=q.device) for size in ((K, V), (K,), ())]
    old = state if kv is None or z is None or unit is None else [kv, z, unit]
    tiles = tiles_for(K, V, one_program=False)
    programs = -(-V // tiles.columns)
    launch(
        kernel, B * H_kv * programs, q, k, v, log_input, log_decay, *old, output, *state, scale, H_kv, H // H_kv,
        *(n for x in (q, k, v) for n in (x.stride(0), x.stride(1), x.stride(3))),
        *log_input.stride()[:2], *log_decay.stride()[:2], *(n for x in old for n in x.stride()),
        K=K, V=V, HAS_STATE=unit is not None, LEAST=UNIT[0], MOST=UNIT[1],
        BLOCK_K=padded(K), BLOCK_V=tiles.columns, PROGRAMS=programs, num_warps=tiles.warps,
    )  # fmt: skip
    return output, state[0], state[1], state[2]


_forward = replayed(_forward)
exponential_step = torch.library.custom_op("linattn::triton_exponential_step", _forward, mutates_args=())


@exponential_step.register_fake
def _(q, k, v, log_input, log_decay, kv, z, unit, scale, out_dtype):  # type: ignore[no-untyped-def]
    (B, H_kv, _, K), V = k.shape, v.shape[3]
    state = [k.new_empty(B, H_kv, *size, dtype=torch.float32) for size in ((K, V), (K,), ())]
    return q.new_empty(*q.shape[:3], V, dtype=out_dtype), *state


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, output[3])


def _gradients(ctx, d_out, d_kv, d_z, _):  # type: ignore[no-untyped-def]
    q, k, v, log_input, log_decay, kv, z, unit, now = ctx.saved_tensors
    i, f = (gate.squeeze(2).double() for gate in (log_input, log_decay))
    m = torch.where(now == -torch.inf, 0.0, now.double())
    kept = torch.full_like(f, -torch.inf) if unit is None else unit.double() + f
    keep, write = (kept - m).float(), (i - m).exp().float().unsqueeze(-1)
    read = (ctx.scale * now.double().clamp(*UNIT).exp()).float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scaled_q, scaled_k = q.squeeze(2) * read.unsqueeze(-1), k.squeeze(2) * write
    d_q, d_k, d_v, d_kv, d_z, d_keep = gradients(
        d_out.squeeze(2), d_kv, d_z, scaled_q, scaled_k, v.squeeze(2), kv, z, keep,
        key_index=False, normalizer="abs_max_one", eps=0.0,
    )  # fmt: skip
    d_q, d_i, d_k = d_q * read.unsqueeze(-1), (d_k * scaled_k).sum(-1), d_k * write
    of_tokens = (d.unsqueeze(2).to(x) for d, x in ((d_q, q), (d_k, k), (d_v, v), (d_i, log_input), (d_keep, log_decay)))
    return *of_tokens, d_kv, d_z, None if unit is None else d_keep.to(unit), None, None


exponential_step.register_autograd(_gradients, setup_context=_remember)
