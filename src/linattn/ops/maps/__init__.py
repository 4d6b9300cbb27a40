"""Feature maps by kind; ``linattn.ops.feature_maps`` has them all."""
