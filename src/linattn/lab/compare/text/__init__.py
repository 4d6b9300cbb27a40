"""Comparisons on sequence tasks."""
