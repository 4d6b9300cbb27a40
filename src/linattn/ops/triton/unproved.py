"""What kernels do in the interpreter and were not proved to do on a GPU: one line each, refused there with its reason.

A line goes when the tests of what it names have passed on a GPU, compiled.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.linear_call import LinearCall

# The kernels of linear attention, as ``kernel_of`` names them.
BIDIRECTIONAL, CAUSAL, DECAY, BOTH_WAYS = "bidirectional", "causal", "causal decay", "decay both ways"
CHANNEL, CHANNEL_BOTH_WAYS, STEP = "channel decay", "channel decay both ways", "step"


class Unproved(NamedTuple):
    """Kernels, and when (a call in mind) they are refused on a GPU."""

    kernels: tuple[str, ...]
    applies: Callable[[LinearCall], bool]
    reason: str


def _half(call: LinearCall) -> bool:
    return torch.float16 in (call.q.dtype, call.k.dtype, call.v.dtype)


def learns_decay_in_16_bits(log_decay: Tensor | None, *inputs: Tensor) -> bool:
    """Whether a decay is to have a gradient beside inputs of 16 bits."""
    narrow = any(x.dtype in (torch.float16, torch.bfloat16) for x in inputs)
    return narrow and log_decay is not None and log_decay.requires_grad and torch.is_grad_enabled()


def _learns_decay(call: LinearCall) -> bool:
    return learns_decay_in_16_bits(call.log_decay, call.q, call.k, call.v)


# The gradient is a difference of q . dq and k . dk, summed over tokens: on an H200 that of LION's decays was off by
# half of itself in bfloat16, where plain PyTorch was off by 0.5 %.
DECAY_GRADIENT = "in 16 bits the gradient of a decay loses too many digits there; use float32, or a decay that is fixed"

UNPROVED = (
    Unproved(
        (BIDIRECTIONAL, CAUSAL, DECAY, BOTH_WAYS, CHANNEL),
        lambda call: call.norm_features is not None,
        "with features of its own for the denominator a read out of bounds was seen and has not been explained",
    ),
    Unproved((DECAY, BOTH_WAYS, CHANNEL), _learns_decay, DECAY_GRADIENT),
    Unproved((DECAY,), _half, "kernels with a decay were not proved in float16; use bfloat16"),
    Unproved((BOTH_WAYS,), _half, "kernels with a decay both ways were not proved in float16; use bfloat16"),
    Unproved((CHANNEL,), _half, "kernels with a decay per channel were not proved in float16; use bfloat16"),
)


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
