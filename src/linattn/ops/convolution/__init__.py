"""Short convolution: a causal depthwise convolution over the last few tokens."""

from linattn.ops.convolution.api import short_convolution, short_convolution_step, short_convolution_with_state
from linattn.ops.convolution.call import ConvolutionState

__all__ = ["ConvolutionState", "short_convolution", "short_convolution_step", "short_convolution_with_state"]
