"""Causal attention with a decay per channel."""
