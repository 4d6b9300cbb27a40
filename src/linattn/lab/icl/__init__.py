"""In-context linear estimation: one-layer models on tasks of regression, beside the best risk in closed form."""
