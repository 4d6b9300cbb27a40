"""Data models: each draws tasks, and knows the best that a step of preconditioned gradient descent can do on them."""
