"""Exponential attention by kernels: in units of a running maximum it is a causal attention with a decay.

With ``U_t = e^{m_t}``, ``o_t = q C / max(|q . n|, e^{-m_t}) = (U_t q) C / max(|(U_t q) . n|, 1)``: a factor on the
queries turns the denominator into that of the decay kernel. It counts as a constant in gradients, as the unit does.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linattn.ops.exponential_call import ExponentialCall
from linattn.ops.exponential_types import ExponentialOutput, ExponentialState
from linattn.ops.prepare import STRONGEST_DECAY, hide, widen
from linattn.ops.triton.causal import attend_causal
from linattn.ops.triton.gates import stabilize_gates
from linattn.ops.triton.operands import one_dtype
from linattn.ops.triton.step import attend_step
from linattn.ops.triton.support import reason_against
from linattn.ops.triton.unproved import DECAY_GRADIENT, learns_decay_in_16_bits
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
    gates = (call.log_input, call.log_decay)
    if call.q.is_cuda and any(learns_decay_in_16_bits(gate, call.q, call.k, call.v) for gate in gates):
        return DECAY_GRADIENT
    return reason_against(call.q, call.k, call.v)


def attend(call: ExponentialCall, out_dtype: torch.dtype) -> ExponentialOutput:
    """Output, and the state where it is needed."""
    q, k, v = one_dtype(call.q, hide(call.k, call.key_mask), call.v)
    if q.dtype == torch.float16:  # which holds neither e^60 nor e^-80
        wide = replace(call, q=q.float(), k=k.float(), v=v.float())
        output, state = attend(wide, torch.float32)
        return ExponentialOutput(output.to(out_dtype), state)
    scale = q.shape[3] ** -0.5 if call.scale is None else call.scale
    log_input, log_decay = (widen(gate) for gate in call.masked_gates())
    if call.is_step:
        return _step(q, k, v, log_input.squeeze(2), log_decay.squeeze(2), scale, call.initial_state, out_dtype)
    start, log_scale = None, None
    if call.initial_state is not None:
        start, log_scale = LinearState(call.initial_state.kv, call.initial_state.k), call.initial_state.log_scale
    stable = stabilize_gates(log_input, log_decay, log_scale, call.cu_seqlens)
    out = attend_causal(
        _in_units(q, stable.log_scale, scale), _scaled(k, stable.log_gain), v, initial=start,
        log_decay=stable.log_decay, decay_index="query", normalizer="abs_max_one", eps=0.0, key_mask=call.key_mask,
        cu_seqlens=call.cu_seqlens, out_dtype=out_dtype, need_state=call.need_state,
    )  # fmt: skip
    final: Any = ExponentialState(*out.state, stable.final_log_scale) if call.need_state else None
    return ExponentialOutput(out.output, final)


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
    """``scale e^m q`` for ``log_scale (B, H_kv, T)``, rounded once."""
    factor = log_scale.clamp(*UNIT) + math.log(scale)
    return _scaled(q, factor.repeat_interleave(q.shape[1] // factor.shape[1], dim=1))


def _scaled(x: Tensor, log_factor: Tensor) -> Tensor:
    return (x * log_factor.exp().float().unsqueeze(-1)).to(x.dtype)
