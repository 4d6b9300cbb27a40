"""The short causal convolution and its decoding step."""
