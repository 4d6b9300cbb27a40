"""Graphs: readers of common files, generators, splits without leaks, and a search for the space that suits a graph."""
