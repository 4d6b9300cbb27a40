"""Graph models on one graph, and what they cost as it grows."""
