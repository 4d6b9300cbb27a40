"""Sizes of the benchmarked language model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSize:
    """A decoder with a tied embedding; ``kv_heads`` divides ``heads``."""

    depth: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        kv = "" if self.kv_heads == self.heads else f" ({self.kv_heads} of keys)"
        return f"{self.depth} layers of {self.width}, {self.heads} heads{kv}, {self.vocabulary} tokens"


# 135 million parameters, and a small size that any machine runs at once.
FULL = ModelSize(depth=30, width=576, heads=9, kv_heads=9, hidden=1280, vocabulary=49152)
TINY = ModelSize(depth=2, width=32, heads=2, kv_heads=2, hidden=48, vocabulary=64)
