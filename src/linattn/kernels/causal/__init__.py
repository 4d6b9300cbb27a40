"""Causal attention without a decay or with one per head or token, decays in both directions, and row sums."""
