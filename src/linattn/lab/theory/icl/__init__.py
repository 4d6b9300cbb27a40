"""In-context linear estimation: one-layer models on regression tasks, beside the best risk in closed form."""
