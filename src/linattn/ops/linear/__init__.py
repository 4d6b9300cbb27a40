"""Linear attention: the op that most mechanisms are built on."""

from linattn.ops.linear.api import linear_attention, linear_attention_step, linear_attention_with_state
from linattn.ops.shared.types import LinearState

__all__ = ["LinearState", "linear_attention", "linear_attention_step", "linear_attention_with_state"]
