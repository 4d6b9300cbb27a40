"""Conversion: other attention inside the timm models that are there."""

from linattn.models.vision.conversion.convert import KNOWN, convert
from linattn.models.vision.conversion.report import ConversionReport, Converted

__all__ = ["KNOWN", "ConversionReport", "Converted", "convert"]
