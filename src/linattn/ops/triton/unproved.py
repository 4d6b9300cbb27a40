"""What kernels do in the interpreter and were not proved to do on a GPU: one line each, refused there with its reason.

A line goes when the tests of what it names have passed on a GPU, compiled.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from linattn.ops.linear_call import LinearCall

# The kernels of linear attention, as ``kernel_of`` names them.
BIDIRECTIONAL, CAUSAL, DECAY, BOTH_WAYS = "bidirectional", "causal", "causal decay", "decay both ways"
CHANNEL, CHANNEL_BOTH_WAYS, STEP = "channel decay", "channel decay both ways", "step"


class Unproved(NamedTuple):
    """Kernels, and when (a call in mind) they are refused on a GPU."""

    kernels: tuple[str, ...]
    applies: Callable[[LinearCall], bool]
    reason: str


def _learns_decay(call: LinearCall, *dtypes: torch.dtype) -> bool:
    """Whether the call's decay is to have a gradient, beside inputs of these dtypes."""
    learned = call.log_decay is not None and call.log_decay.requires_grad and torch.is_grad_enabled()
    return learned and any(x.dtype in dtypes for x in (call.q, call.k, call.v))


UNPROVED: tuple[Unproved, ...] = ()


def is_step(call: LinearCall) -> bool:
    """Whether the call is one token of decoding."""
    alone = call.key_mask is None and call.cu_seqlens is None
    return call.causal and call.need_state and alone and call.k.shape[2] == 1


def kernel_of(call: LinearCall) -> str:
    """Which kernels serve the call."""
    if is_step(call):
        return STEP
    if call.log_decay is None:
        return CAUSAL if call.causal else BIDIRECTIONAL
    if call.log_decay.ndim == 4:
        return CHANNEL if call.causal else CHANNEL_BOTH_WAYS
    return DECAY if call.causal else BOTH_WAYS


def reason_unproved(call: LinearCall) -> str:
    """The line that refuses the call on a GPU; empty if there is none, and in the interpreter."""
    if call.q.device.type != "cuda":
        return ""
    kernel = kernel_of(call)
    return next((line.reason for line in UNPROVED if kernel in line.kernels and line.applies(call)), "")
