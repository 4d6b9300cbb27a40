"""Degrees of freedom of the attention kernel: how many features each layer needs, and features to match."""

from linattn.convert.degrees.allocate import allocate
from linattn.convert.degrees.gram import kernel_degrees
from linattn.convert.degrees.kernel import PositiveFeatures, normal_features
from linattn.convert.degrees.layers import install_features, learn_layers
from linattn.convert.degrees.learn import FeatureLearner, LearnOptions, learn_features
from linattn.convert.degrees.leverage import LeverageDensity, leverage_features
from linattn.convert.degrees.measure import DegreesOfFreedom, MeasuredLayer, degrees_of_freedom

__all__ = [
    "DegreesOfFreedom",
    "FeatureLearner",
    "LearnOptions",
    "LeverageDensity",
    "MeasuredLayer",
    "PositiveFeatures",
    "allocate",
    "degrees_of_freedom",
    "install_features",
    "kernel_degrees",
    "learn_features",
    "learn_layers",
    "leverage_features",
    "normal_features",
]
