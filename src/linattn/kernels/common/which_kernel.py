"""The choice of kernels for a call of linear attention."""

from linattn.ops.linear.call import LinearCall

BIDIRECTIONAL, CAUSAL, DECAY, BOTH_WAYS = "bidirectional", "causal", "causal decay", "decay both ways"
CHANNEL, CHANNEL_BOTH_WAYS, STEP = "channel decay", "channel decay both ways", "step"


def kernel_of(call: LinearCall) -> str:
    """The name of the kernels that serve the call."""
    if call.is_step:
        return STEP
    if call.log_decay is None:
        return CAUSAL if call.causal else BIDIRECTIONAL
    if call.log_decay.ndim == 4:
        return CHANNEL if call.causal else CHANNEL_BOTH_WAYS
    return DECAY if call.causal else BOTH_WAYS
