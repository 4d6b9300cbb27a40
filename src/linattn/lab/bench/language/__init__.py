"""Shared by the benchmarks of language models: the model, sizes, rows that resume, processes, and chart lines."""
