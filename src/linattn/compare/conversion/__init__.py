"""A trained softmax model converted to other mechanisms: what that costs, and what little training brings back."""
