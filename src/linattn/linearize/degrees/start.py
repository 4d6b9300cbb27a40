"""Random features that begin where the degrees of freedom say: how many a layer gets, and which."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from linattn.linearize.degrees.layers import install_features
from linattn.linearize.degrees.measure import DegreesOfFreedom, degrees_of_freedom
from linattn.linearize.layer.attention import linearized_layers
from linattn.linearize.layer.features import RandomFeatures
from linattn.linearize.training.setting import Batches

MEASURED_BATCHES = 16
# Degrees of one draw hang on its few points of large norm: of three draws they gave other dimensions for every seed,
# and these no gain over equal ones. At a tolerance of 2^-8 layers of small models hardly differ.
POINTS, DRAWS, TOLERANCE = 512, 16, 2**-4


def measured(
    model: nn.Module, batches: Batches, layers: Sequence[int], tolerance: float = TOLERANCE
) -> DegreesOfFreedom:
    """Degrees of freedom of some layers on the first batches.

    Keys without their mean, which softmax attention does not see: it is most of their length in pretrained models, and
    features of long vectors hardly overlap.
    """
    seen = [batches(step) for step in range(MEASURED_BATCHES)]
    return degrees_of_freedom(model, seen, tolerance=tolerance, points=POINTS, draws=DRAWS, layers=layers, center=True)


def start_features(model: nn.Module, degrees: DegreesOfFreedom, seed: int) -> None:
    """Draw the random features of a converted model anew, as ``degrees.start`` does by default; other features stay."""
    found: dict[int, Any] = {}
    for number, layer in linearized_layers(model).items():
        features = getattr(layer.core, "features", None)
        if isinstance(features, RandomFeatures):
            found[number] = features
    starts = degrees.start({number: features.num_features for number, features in found.items()}, seed)
    install_features(model, starts, degrees)
