"""Conversion of a trained softmax model to other mechanisms: what is lost, and what a little training restores."""
