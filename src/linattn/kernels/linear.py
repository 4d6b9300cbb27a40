"""Linear attention by kernels: which kernel serves a call, and which calls none serves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linattn.kernels.bidirectional.attend import attend_all
from linattn.kernels.bidirectional.config import can_fuse
from linattn.kernels.causal.attend import attend_both_ways, attend_causal
from linattn.kernels.channel_decay.attend import attend_channel_decay
from linattn.kernels.common import which_kernel
from linattn.kernels.common.operands import one_dtype
from linattn.kernels.common.support import reason_against
from linattn.kernels.common.turned import attend_turned, twins_to_turn
from linattn.kernels.maps.apply import map_features
from linattn.kernels.step.attend import attend_step
from linattn.ops.linear.call import (
    LinearCall,
    join_outputs,
    log_decay_for,
    log_input_for,
    normalize,
    order_queries,
    rotated,
    split_decay,
    split_values,
    weigh,
)
from linattn.ops.maps import FeatureMap, Twin
from linattn.ops.shared.types import AttentionOutput, LinearState

WIDEST = 256  # features, and values of a head
# Columns of ones for a denominator of its own: products with fewer columns have gone wrong on Hopper.
ONES = 64

# Kernels that take weights of keys; for others the keys are multiplied by them before.
WEIGHING = (which_kernel.CAUSAL, which_kernel.DECAY, which_kernel.BOTH_WAYS)

# (q, k, v, initial, normalizer=, out_dtype=, need_state=): one kernel with all else settled.
Run = Callable[..., AttentionOutput]


def against(call: LinearCall) -> str:
    """Why no kernel serves the call, in words; empty if one does."""
    features = call.num_features(1)
    widest = max(features, call.v.shape[3] // call.flows, *(x.shape[3] for x in call.norm_features or ()))
    if widest > WIDEST:
        return f"they take up to {WIDEST} features and values of a head, got {widest}"
    if not min(*call.q.shape[:3], call.k.shape[2], features, call.v.shape[3]):
        return "an empty input needs none"
    if which_kernel.kernel_of(call) == which_kernel.CHANNEL_BOTH_WAYS:
        return "a decay per channel has a causal kernel only, none that runs both ways"
    return reason_against(call.q, call.k, call.v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, initial: LinearState | None, call: LinearCall, out_dtype: torch.dtype
) -> AttentionOutput:
    """One fused call on unmapped q and k (masked keys are 0); a denominator of its own takes a second call."""
    kernel = which_kernel.kernel_of(call)
    if call.rotate is not None:
        turning = twins_to_turn(call)
        if turning is not None:
            return attend_turned(q, k, v, turning, call, out_dtype)
    plain = call.norm_features is None and call.log_input is None and call.rotate is None
    if kernel == which_kernel.BIDIRECTIONAL and plain:
        twins = _twins(call)
        if twins is not None and can_fuse(q, v, twins, call.cu_seqlens):
            return attend_all(
                *one_dtype(q, k, v), maps=twins, normalizer=call.normalizer, eps=call.eps, key_mask=call.key_mask,
                cu_seqlens=call.cu_seqlens, initial=initial, out_dtype=out_dtype, need_state=call.need_state,
            )  # fmt: skip
    phi, psi = (_mapped(x, feature_map) for x, feature_map in zip((q, k), call.maps, strict=True))
    phi, psi, norm_features = rotated(order_queries(phi, call.flows, k.shape[1]), psi, call)
    v = split_values(v, call.flows)
    # A decay per channel is as large as the keys: its kernels bound it and skip masked tokens when they read it.
    bounded = call.log_decay if kernel == which_kernel.CHANNEL else log_decay_for(call.log_decay, call.key_mask)
    decay, log_input = bounded, log_input_for(call.log_input, call.key_mask)
    run = _runner(kernel, call, split_decay(decay, call.flows), split_decay(log_input, call.flows))
    phi, psi, v = one_dtype(phi, psi, v)
    if norm_features is None:
        out = run(phi, psi, v, initial, normalizer=call.normalizer, out_dtype=out_dtype, need_state=call.need_state)
    else:
        out = _with_own_denominator(run, phi, psi, v, initial, norm_features, call, out_dtype)
    return AttentionOutput(join_outputs(out.output, call.flows, k.shape[1]), out.state)


def _twins(call: LinearCall) -> tuple[Twin, Twin] | None:
    """How kernels run the maps of q and k; None unless both have a twin."""
    q_map, k_map = call.maps
    if q_map is None or k_map is None:
        return None
    q_twin, k_twin = q_map.twin(), k_map.twin()
    return None if q_twin is None or k_twin is None else (q_twin, k_twin)


def _mapped(x: Tensor, feature_map: FeatureMap | None) -> Tensor:
    """Features ``(B, H flows, T, F)``: by a kernel if the map has a twin, otherwise by the map itself."""
    if feature_map is None:
        return x
    twin = feature_map.twin()
    return feature_map(x) if twin is None else map_features(x, twin)


def _runner(kernel: str, call: LinearCall, decay: Tensor | None, log_input: Tensor | None) -> Run:
    options: dict[str, Any] = {"eps": call.eps}
    if kernel in WEIGHING:
        options["log_input"] = log_input
    elif log_input is not None:
        return partial(_run_weighed, _runner(kernel, call, decay, None), log_input)
    if kernel == which_kernel.STEP:
        return partial(_run_step, decay=decay, decay_index=call.decay_index or "query", **options)
    options |= {"key_mask": call.key_mask, "cu_seqlens": call.cu_seqlens}
    if kernel == which_kernel.BIDIRECTIONAL:
        return partial(_run_all, **options)
    options |= {"log_decay": decay, "decay_index": call.decay_index or ("query" if call.causal else "key")}
    if kernel == which_kernel.BOTH_WAYS:
        return partial(_run_both_ways, **options)
    if kernel == which_kernel.CHANNEL:
        return partial(_run_causal, attend_channel_decay, **options)
    return partial(_run_causal, attend_causal, tf32=call.tf32, **options)


def _run_weighed(
    run: Run, log_input: Tensor, q: Tensor, k: Tensor, v: Tensor, initial: LinearState | None, **options: Any
) -> AttentionOutput:
    return run(q, weigh(k, log_input), v, initial, **options)


def _run_all(q: Tensor, k: Tensor, v: Tensor, initial: LinearState | None, **options: Any) -> AttentionOutput:
    return attend_all(q, k, v, initial=initial, **options)


def _run_causal(
    attend_one: Callable[..., AttentionOutput], q: Tensor, k: Tensor, v: Tensor, initial: LinearState | None,
    **options: Any,
) -> AttentionOutput:  # fmt: skip
    return attend_one(q, k, v, initial=initial, **options)


def _run_both_ways(q: Tensor, k: Tensor, v: Tensor, initial: LinearState | None, **options: Any) -> AttentionOutput:
    """Run a decay in both directions, which has no state: none is given and none is returned."""
    del options["need_state"]
    nothing: Any = None
    return AttentionOutput(attend_both_ways(q, k, v, **options), nothing)


def _run_step(
    q: Tensor, k: Tensor, v: Tensor, initial: LinearState | None, *, decay: Tensor | None, need_state: bool,
    **options: Any,
) -> AttentionOutput:  # fmt: skip
    now = decay if decay is None or decay.ndim == 1 else decay.squeeze(2)
    out = attend_step(q.squeeze(2), k.squeeze(2), v.squeeze(2), initial, log_decay=now, **options)
    return AttentionOutput(out.output.unsqueeze(2), out.state)


def _with_own_denominator(
    run: Run, phi: Tensor, psi: Tensor, v: Tensor, initial: LinearState | None, norm_features: tuple[Tensor, Tensor],
    call: LinearCall, out_dtype: torch.dtype,
) -> AttentionOutput:  # fmt: skip
    """Run with a denominator of its own: a second linear attention over the norm features, with values of 1."""
    options: dict[str, Any] = {"normalizer": None, "out_dtype": torch.float32, "need_state": call.need_state}
    start, norm_start = None, None
    if initial is not None:
        start = LinearState(initial.kv, torch.zeros_like(initial.kv[..., 0]))
        # With values of 1 every column of the state is the sum of keys.
        norm_start = LinearState(initial.k.unsqueeze(-1).expand(*initial.k.shape, ONES), initial.k)
    numerator, state = run(phi, psi, v, start, **options)
    norm_q, norm_k, ones = one_dtype(*norm_features, v.new_ones(*v.shape[:3], ONES))
    denominator, norm_state = run(norm_q, norm_k, ones, norm_start, **options)
    output = normalize(numerator, denominator[..., 0], call.normalizer, call.eps).to(out_dtype)
    return AttentionOutput(output, LinearState(state.kv, norm_state.k) if call.need_state else state)
