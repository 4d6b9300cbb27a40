"""What a pretrained model's attention is like, layer by layer, and what could take its place."""

from linattn.linearize.inspect.diagnosis import InspectOptions, LayerDiagnosis, convertible_sites, inspect

__all__ = ["InspectOptions", "LayerDiagnosis", "convertible_sites", "inspect"]
