"""Hybrid attention: exact softmax over a window and chosen tokens, linear attention over the rest."""

from linattn.ops.hybrid.api import hybrid_attention, hybrid_attention_step, hybrid_attention_with_state
from linattn.ops.hybrid.types import HybridState, SalientBudget

__all__ = [
    "HybridState",
    "SalientBudget",
    "hybrid_attention",
    "hybrid_attention_step",
    "hybrid_attention_with_state",
]
