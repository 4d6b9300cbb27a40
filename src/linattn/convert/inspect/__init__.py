"""Diagnosis of a pretrained model: its attention, layer by layer, and which candidates could replace it."""

from linattn.convert.inspect.diagnosis import InspectOptions, inspect

__all__ = ["InspectOptions", "inspect"]
