"""Benchmarks of attention: speed and memory side by side, with every result checked in the same run."""
