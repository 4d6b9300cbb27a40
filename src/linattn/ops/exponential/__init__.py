"""Exponential attention: the recurrence of the mLSTM."""

from linattn.ops.exponential.api import (
    exponential_attention,
    exponential_attention_step,
    exponential_attention_with_state,
)
from linattn.ops.exponential.call import ExponentialState

__all__ = [
    "ExponentialState",
    "exponential_attention",
    "exponential_attention_step",
    "exponential_attention_with_state",
]
