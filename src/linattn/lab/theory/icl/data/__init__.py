"""Data models: each draws tasks, and knows the best risk of one step of preconditioned gradient descent on them."""
