"""Conversion: replaces the attention inside existing timm models."""

from linattn.convert.vision.convert import KNOWN, convert
from linattn.convert.vision.report import ConversionReport, Converted

__all__ = ["KNOWN", "ConversionReport", "Converted", "convert"]
