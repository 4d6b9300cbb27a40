"""Comparisons: several mechanisms in the same host with the same budget."""
