"""The algebra: pure functions on ``(B, H, T, D)`` tensors, known by what they compute."""
