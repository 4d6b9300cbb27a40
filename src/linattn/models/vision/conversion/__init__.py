"""Conversion: replaces the attention inside existing timm models."""

from linattn.models.vision.conversion.convert import KNOWN, convert
from linattn.models.vision.conversion.report import ConversionReport, Converted

__all__ = ["KNOWN", "ConversionReport", "Converted", "convert"]
