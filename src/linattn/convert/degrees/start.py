"""Starts the random features of a converted model from the degrees of freedom of its layers."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from linattn.convert.degrees.layers import install_features
from linattn.convert.degrees.measure import DegreesOfFreedom, degrees_of_freedom
from linattn.convert.layer.attention import linearized_layers
from linattn.convert.layer.features import RandomFeatures
from linattn.convert.training.loop import Batches

MEASURED_BATCHES = 16
# The degrees of one draw depend on its few points of large norm: with three draws every seed gave other dimensions,
# and those were no better than equal ones. At a tolerance of 2^-8, layers of small models hardly differ.
POINTS, DRAWS, TOLERANCE = 512, 16, 2**-4


def measured(
    model: nn.Module, batches: Batches, layers: Sequence[int], tolerance: float = TOLERANCE
) -> DegreesOfFreedom:
    """Degrees of freedom of some layers, measured on the first batches.

    The mean key is subtracted from the keys, which does not change softmax attention: in pretrained models it makes up
    most of their length, and features of long vectors hardly overlap.
    """
    seen = [batches(step) for step in range(MEASURED_BATCHES)]
    return degrees_of_freedom(model, seen, tolerance=tolerance, points=POINTS, draws=DRAWS, layers=layers, center=True)


def start_features(model: nn.Module, degrees: DegreesOfFreedom, seed: int) -> None:
    """Redraw the random features of a converted model, by ``degrees.start`` with its defaults; other features stay."""
    found: dict[int, Any] = {}
    for number, layer in linearized_layers(model).items():
        features = getattr(layer.core, "features", None)
        if isinstance(features, RandomFeatures):
            found[number] = features
    starts = degrees.start({number: features.num_features for number, features in found.items()}, seed)
    install_features(model, starts, degrees)
