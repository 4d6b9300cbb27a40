"""Feature maps as small frozen values, named after what they compute.

A map turns ``(B, H, T, D)`` into ``(B, H, T, F)`` features. ``linear_attention(..., feature_map=EluPlusOne())``
applies one map to q and k; a pair ``(map_q, map_k)`` gives each its own. A map that has a *twin* runs inside kernels.
"""

from linattn.ops.maps.base import (
    EluPlusOne,
    FeatureMap,
    PairRelu,
    Relu,
    Scaled,
    SoftmaxPair,
    Squares,
    TaylorExp,
    Twin,
    UnitSilu,
    WideMap,
)
from linattn.ops.maps.powers import NormPower, ShiftedPower, SignPower, SplitExpm1, SplitPower

__all__ = [
    "EluPlusOne",
    "FeatureMap",
    "NormPower",
    "PairRelu",
    "Relu",
    "Scaled",
    "ShiftedPower",
    "SignPower",
    "SoftmaxPair",
    "SplitExpm1",
    "SplitPower",
    "Squares",
    "TaylorExp",
    "Twin",
    "UnitSilu",
    "WideMap",
]
