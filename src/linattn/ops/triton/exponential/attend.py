"""Exponential attention by kernels: gates as factors of keys, in the unit of a chunk's end, and a walk along time.

The walk takes q, k and v as they are. A step of decoding is that of linear attention: with ``U = e^m``,
``o = q C / max(|q . n|, e^{-m}) = (U q) C / max(|(U q) . n|, 1)``, a factor on the query that counts as a constant in
gradients, as the unit does.
"""

import math
from typing import Any

import torch
from torch import Tensor

from linattn.ops.exponential_call import ExponentialCall
from linattn.ops.exponential_types import ExponentialOutput, ExponentialState
from linattn.ops.prepare import STRONGEST_DECAY, hide, widen
from linattn.ops.triton.causal.widths import first_of, missing, padded_by
from linattn.ops.triton.exponential.library import exponential_directly
from linattn.ops.triton.operands import one_dtype
from linattn.ops.triton.step.attend import attend_step
from linattn.ops.triton.support import reason_against
from linattn.ops.types import LinearState

WIDEST = 256
# Of m, in the factor on the queries: e^60 leaves fp32 room for sums of 1e12, e^-80 is a normal number.
UNIT = -80.0, 60.0


def against(call: ExponentialCall) -> str:
    """Why no kernel serves the call, in words; empty if one does."""
    widest = max(call.q.shape[3], call.v.shape[3])
    if widest > WIDEST:
        return f"they take up to {WIDEST} features and values of a head, got {widest}"
    if not min(*call.q.shape, call.v.shape[3]):
        return "an empty input needs none"
    return reason_against(call.q, call.k, call.v)


def attend(call: ExponentialCall, out_dtype: torch.dtype) -> ExponentialOutput:
    """Output, and the state where it is needed."""
    q, k, v = one_dtype(call.q, hide(call.k, call.key_mask), hide(call.v, call.key_mask))
    scale = q.shape[3] ** -0.5 if call.scale is None else call.scale
    log_input, log_decay = call.masked_gates()
    if call.is_step:
        i, f = (widen(gate).squeeze(2) for gate in (log_input, log_decay))
        return _step(q, k, v, i, f, scale, call.initial_state, out_dtype)
    K, V = q.shape[3], v.shape[3]
    more_k, more_v = missing(K, q.dtype), missing(V, q.dtype)
    kv = z = unit = None
    if call.initial_state is not None:
        kv, z, unit = call.initial_state
        kv, z, unit = padded_by(kv.float(), more_v, more_k), padded_by(z.float(), more_k), unit.double()
    # Backward reads the output, and where one token outweighs all others its rounding is what is left of a gradient.
    kept = torch.float32 if q.dtype == torch.float16 else out_dtype
    out, kv, z, unit, *_ = exponential_directly(
        padded_by(q, more_k), padded_by(k, more_k), padded_by(v, more_v), log_input, log_decay, kv, z, unit,
        call.cu_seqlens, float(scale), kept, call.need_state,
    )  # fmt: skip
    final: Any = None
    if call.need_state:
        final = ExponentialState(first_of(first_of(kv, 2, K), 3, V), first_of(z, 2, K), unit.detach())
    return ExponentialOutput(first_of(out, 3, V).to(out_dtype), final)


def _step(
    q: Tensor, k: Tensor, v: Tensor, log_input: Tensor, log_decay: Tensor, scale: float,
    state: ExponentialState | None, out_dtype: torch.dtype,
) -> ExponentialOutput:  # fmt: skip
    """One token; the unit is rounded before the sums are put into it, so that the state is written once."""
    before = log_decay if state is None else widen(state.log_scale) + log_decay
    log_scale = (log_input if state is None else torch.maximum(before, log_input)).detach().float()
    unit = torch.where(log_scale == -torch.inf, 0.0, widen(log_scale))  # nothing came yet
    keep = (before - unit).clamp(min=STRONGEST_DECAY).float()
    q, k = _in_units(q, log_scale.unsqueeze(-1), scale), _scaled(k, (log_input - unit).unsqueeze(-1))
    out = attend_step(
        q.squeeze(2), k.squeeze(2), v.squeeze(2), None if state is None else LinearState(*state[:2]), log_decay=keep,
        normalizer="abs_max_one", eps=0.0, out_dtype=out_dtype,
    )  # fmt: skip
    return ExponentialOutput(out.output.unsqueeze(2), ExponentialState(*out.state, log_scale))


def _in_units(q: Tensor, log_scale: Tensor, scale: float) -> Tensor:
    """``scale e^m q`` for ``log_scale (B, H_kv, T)``, in fp32."""
    factor = log_scale.clamp(*UNIT) + math.log(scale)
    return _scaled(q, factor.repeat_interleave(q.shape[1] // factor.shape[1], dim=1))


def _scaled(x: Tensor, log_factor: Tensor) -> Tensor:
    """In fp32: rounded with its factor, one token could spoil a denominator that is a small difference."""
    return x.float() * log_factor.exp().float().unsqueeze(-1)
