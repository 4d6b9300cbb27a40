"""linattn: linear attention for PyTorch."""

from linattn._version import __version__
from linattn.mechanisms.registry import create_mechanism, list_mechanisms, mechanism_info, register_mechanism
from linattn.ops.linear import explain, linear_attention, linear_attention_step, linear_attention_with_state

__all__ = [
    "__version__",
    "create_mechanism",
    "explain",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_with_state",
    "list_mechanisms",
    "mechanism_info",
    "register_mechanism",
]
