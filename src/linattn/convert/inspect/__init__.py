"""Diagnosis of a pretrained model: its attention, layer by layer, and which candidates could replace it."""

from linattn.convert.inspect.diagnosis import InspectOptions, LayerDiagnosis, convertible_sites, inspect

__all__ = ["InspectOptions", "LayerDiagnosis", "convertible_sites", "inspect"]
