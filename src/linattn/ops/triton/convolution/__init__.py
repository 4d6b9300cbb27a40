"""Short causal convolution and its step."""
