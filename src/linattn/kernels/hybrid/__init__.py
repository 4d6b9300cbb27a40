"""Softmax over a window and chosen tokens, linear attention over the rest."""
