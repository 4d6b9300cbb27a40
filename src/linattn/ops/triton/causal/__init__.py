"""Causal attention with and without a decay per head or token, decays both ways, row sums."""
