"""The algebra: pure functions on ``(B, H, T, D)`` tensors, each defined by what it computes."""
