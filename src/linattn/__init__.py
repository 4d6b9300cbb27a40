"""linattn: linear attention for PyTorch."""

import importlib
from typing import Any

from linattn._version import __version__
from linattn.mechanisms.registry import create_mechanism, list_mechanisms, mechanism_info, register_mechanism
from linattn.ops.convolution import short_convolution, short_convolution_step, short_convolution_with_state
from linattn.ops.explain import explain
from linattn.ops.exponential import (
    exponential_attention,
    exponential_attention_step,
    exponential_attention_with_state,
)
from linattn.ops.hybrid import hybrid_attention, hybrid_attention_step, hybrid_attention_with_state
from linattn.ops.linear import linear_attention, linear_attention_step, linear_attention_with_state

__all__ = [
    "__version__",
    "create_mechanism",
    "explain",
    "exponential_attention",
    "exponential_attention_step",
    "exponential_attention_with_state",
    "hybrid_attention",
    "hybrid_attention_step",
    "hybrid_attention_with_state",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_with_state",
    "list_mechanisms",
    "mechanism_info",
    "register_mechanism",
    "short_convolution",
    "short_convolution_step",
    "short_convolution_with_state",
]

_FOLDERS = ("convert", "layers", "models")  # imported when they are first named: `import linattn` stays quick


def __getattr__(name: str) -> Any:
    if name == "linearize":
        return importlib.import_module("linattn.convert.run").linearize
    if name in _FOLDERS:
        return importlib.import_module(f"linattn.{name}")
    raise AttributeError(f"module 'linattn' has no attribute {name!r}")
