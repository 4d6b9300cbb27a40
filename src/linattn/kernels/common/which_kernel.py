"""The choice of kernels for a call of linear attention."""

from linattn.ops.linear.call import LinearCall

BIDIRECTIONAL, CAUSAL, DECAY, BOTH_WAYS = "bidirectional", "causal", "causal decay", "decay both ways"
CHANNEL, CHANNEL_BOTH_WAYS, STEP = "channel decay", "channel decay both ways", "step"


def is_step(call: LinearCall) -> bool:
    """Whether the call is one token of decoding."""
    alone = call.key_mask is None and call.cu_seqlens is None
    return call.causal and call.need_state and alone and call.k.shape[2] == 1


def kernel_of(call: LinearCall) -> str:
    """The name of the kernels that serve the call."""
    if is_step(call):
        return STEP
    if call.log_decay is None:
        return CAUSAL if call.causal else BIDIRECTIONAL
    if call.log_decay.ndim == 4:
        return CHANNEL if call.causal else CHANNEL_BOTH_WAYS
    return DECAY if call.causal else BOTH_WAYS
