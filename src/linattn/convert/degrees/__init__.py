"""Degrees of freedom of the attention kernel: how many features each layer needs, and features to match."""

from linattn.convert.degrees.allocate import allocate
from linattn.convert.degrees.kernel import (
    LeverageDensity,
    PositiveFeatures,
    kernel_degrees,
    leverage_features,
    normal_features,
)
from linattn.convert.degrees.measure import DegreesOfFreedom, MeasuredLayer, degrees_of_freedom, install_features

__all__ = [
    "DegreesOfFreedom",
    "LeverageDensity",
    "MeasuredLayer",
    "PositiveFeatures",
    "allocate",
    "degrees_of_freedom",
    "install_features",
    "kernel_degrees",
    "leverage_features",
    "normal_features",
]
