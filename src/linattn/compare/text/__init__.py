"""Comparisons on tasks of sequences."""
