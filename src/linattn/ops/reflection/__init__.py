"""Reflections of queries and keys before a feature map."""

from linattn.ops.reflection.api import pair_matrices, reflect_heads
from linattn.ops.reflection.types import Modulation, Reflected

__all__ = ["Modulation", "Reflected", "pair_matrices", "reflect_heads"]
