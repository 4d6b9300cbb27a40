"""Degrees of freedom of the attention kernel: how many features each layer needs, and features to match."""
