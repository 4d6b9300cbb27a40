"""Exponential attention by kernels: gates become factors of keys, in the unit of a chunk's end, for a walk along time.

The walk takes q, k and v unchanged. A decoding step has its own kernel, see ``step``.
"""

from typing import Any

import torch

from linattn.kernels.causal.widths import first_of, missing, padded_by
from linattn.kernels.common.operands import one_dtype
from linattn.kernels.common.support import reason_against
from linattn.kernels.exponential.library import exponential_directly
from linattn.kernels.exponential.step import attend_step
from linattn.ops.exponential.call import ExponentialCall, ExponentialOutput, ExponentialState
from linattn.ops.shared.call import hide

WIDEST = 256


def against(call: ExponentialCall) -> str:
    """Why no kernel serves the call, in words; empty if one does."""
    widest = max(call.q.shape[3], call.v.shape[3])
    if widest > WIDEST:
        return f"they take up to {WIDEST} features and values of a head, got {widest}"
    if not min(*call.q.shape, call.v.shape[3]):
        return "an empty input needs none"
    return reason_against(call.q, call.k, call.v)


def attend(call: ExponentialCall, out_dtype: torch.dtype) -> ExponentialOutput:
    """Output, and the state if it is needed."""
    scale = call.q.shape[3] ** -0.5 if call.scale is None else call.scale
    if call.is_step:
        return attend_step(call, scale, out_dtype)
    q, k, v = one_dtype(call.q, hide(call.k, call.key_mask), hide(call.v, call.key_mask))
    log_input, log_decay = call.masked_gates()
    K, V = q.shape[3], v.shape[3]
    more_k, more_v = missing(K, q.dtype), missing(V, q.dtype)
    kv = z = unit = None
    if call.initial_state is not None:
        kv, z, unit = call.initial_state
        kv, z, unit = padded_by(kv.float(), more_v, more_k), padded_by(z.float(), more_k), unit.double()
    # The backward pass reads the output; if one token outweighs all others, little but its rounding is in a gradient.
    kept = torch.float32 if q.dtype == torch.float16 else out_dtype
    out, kv, z, unit, *_ = exponential_directly(
        padded_by(q, more_k), padded_by(k, more_k), padded_by(v, more_v), log_input, log_decay, kv, z, unit,
        call.cu_seqlens, float(scale), kept, call.need_state,
    )  # fmt: skip
    final: Any = None
    if call.need_state:
        final = ExponentialState(first_of(first_of(kv, 2, K), 3, V), first_of(z, 2, K), unit.detach())
    return ExponentialOutput(first_of(out, 3, V).to(out_dtype), final)
