"""Linear attention by kernels: which one serves a call, and what none does."""

from typing import Any

import torch
from torch import Tensor

from linattn.ops.linear_call import LinearCall
from linattn.ops.prepare import normalize
from linattn.ops.triton.bidirectional import attend_all
from linattn.ops.triton.support import reason_against
from linattn.ops.types import AttentionOutput, LinearState

WIDEST = 256  # features, and values of a head


def against(call: LinearCall) -> str:
    """Why no kernel serves the call, in words; empty if one does."""
    if call.causal or call.log_decay is not None:
        return "kernels that are causal or decay are not offered yet: some are wrong when compiled for Hopper"
    features = call.num_features(1)
    widest = max(features, call.v.shape[3], *(x.shape[3] for x in call.norm_features or ()))
    if widest > WIDEST:
        return f"they take up to {WIDEST} features and values of a head, got {widest}"
    if not min(call.q.shape[2], call.k.shape[2], features, call.v.shape[3]):
        return "an empty input needs none"
    if call.q.dtype == torch.float16 and call.q.device.type == "cuda":
        return "in float16 the queries' gradient of long sequences exceeds its error budget; use bfloat16"
    return reason_against(call.q, call.k, call.v)


def attend(
    phi: Tensor, psi: Tensor, v: Tensor, initial: LinearState | None, call: LinearCall, out_dtype: torch.dtype
) -> AttentionOutput:
    """One fused call; a denominator with features of its own is a second one, over values of 1."""
    options: dict[str, Any] = {"key_mask": call.key_mask, "cu_seqlens": call.cu_seqlens, "eps": call.eps}
    if call.norm_features is None:
        options |= {"normalizer": call.normalizer, "out_dtype": out_dtype, "need_state": call.need_state}
        return AttentionOutput(*attend_all(phi, psi, v, initial=initial, **options))
    options |= {"normalizer": None, "out_dtype": torch.float32, "need_state": True}
    start, norm_start = None, None
    if initial is not None:
        start = LinearState(initial.kv, torch.zeros_like(initial.kv[..., 0]))
        norm_start = LinearState(initial.k.unsqueeze(-1), initial.k)  # summed with values of 1, both are one
    numerator, state = attend_all(phi, psi, v, initial=start, **options)
    ones = torch.ones_like(v[..., :1])
    denominator, norm_state = attend_all(*call.norm_features, ones, initial=norm_start, **options)
    assert state is not None
    assert norm_state is not None
    output = normalize(numerator, denominator.squeeze(-1), call.normalizer, call.eps)
    return AttentionOutput(output.to(out_dtype), LinearState(state.kv, norm_state.k))
