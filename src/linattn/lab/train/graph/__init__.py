"""Training on one graph: classes of nodes, or links between them."""
