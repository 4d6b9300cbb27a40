"""Comparisons of models on one graph, and of their cost as a graph grows."""
