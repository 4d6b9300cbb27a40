"""Causal attention with an exponential input gate."""
