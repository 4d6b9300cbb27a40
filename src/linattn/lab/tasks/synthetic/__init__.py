"""Controlled tasks of Physics of Language Models 4.1: depth, breadth, capacity, manipulation, structure."""
