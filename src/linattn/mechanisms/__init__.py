"""The papers: one file each, a module that turns (q, k, v) into features, gates and one call of ops."""
