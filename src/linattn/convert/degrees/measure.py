"""Degrees of freedom of every layer and head of a model, and the features that a converted one starts from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from linattn.convert.degrees.kernel import (
    PositiveFeatures,
    kernel_degrees,
    leverage_features,
    log_features,
    normal_features,
    scaled,
)
from linattn.convert.degrees.observe import Batch, Reservoir, watch
from linattn.convert.layer.attention import Observation, linearized_layers
from linattn.convert.layer.features import RandomFeatures
from linattn.convert.training.loop import Batches
from linattn.support.options import check_integer, check_option

MEASURED_BATCHES = 16
# The degrees of one draw depend on its few points of large norm: with three draws every seed gave other dimensions,
# and those were no better than equal ones. At a tolerance of 2^-8, layers of small models hardly differ.
POINTS, DRAWS, TOLERANCE = 512, 16, 2**-4


@dataclass(frozen=True, eq=False)
class MeasuredLayer:
    """Degrees of freedom of one layer, for each key head, and the sample they were measured on."""

    mean: Tensor  # (H_kv,), mean over draws
    std: Tensor  # (H_kv,), standard deviation between draws
    points: Tensor  # (H_kv, J, D), the last draw; with ``center`` its keys are without their mean
    center: Tensor  # (H_kv, D), the mean key, or 0
    keys: Tensor  # (H_kv, N, D), the keys themselves


@dataclass(frozen=True, eq=False)
class DegreesOfFreedom:
    """Degrees of freedom of every layer, and the tolerance they were measured at."""

    layers: dict[int, MeasuredLayer]
    tolerance: float

    def values(self) -> dict[int, float]:
        """One number per layer, for ``allocate``: the largest of its heads, as in the paper."""
        return {index: float(layer.mean.max()) for index, layer in self.layers.items()}

    def to_dict(self) -> dict[str, Any]:
        """As plain values, without the points."""
        rows = [
            {"layer": index, "degrees": layer.mean.tolist(), "std": layer.std.tolist()}
            for index, layer in self.layers.items()
        ]
        return {"tolerance": self.tolerance, "layers": rows}

    def start(self, dims: dict[int, int], seed: int = 0, sampling: str = "normal") -> dict[int, PositiveFeatures]:
        """Draw features for the layers in ``dims``: ``z ~ N(0, I)``, or by leverage scores at the same tolerance.

        Leverage scores serve the kernel itself, in which the few points of large norm outweigh all others. But rows of
        attention are divided by their sums, so that every query counts alike: for these, and as a start for learning
        them, few features (64 per head of a small Llama) drawn from N(0, I) were better.
        """
        check_option("sampling", sampling, ("normal", "leverage"))
        generator = Generator().manual_seed(seed)
        drawn = {}
        for index, count in dims.items():
            heads, _, dim = (points := self.layers[index].points).shape
            if sampling == "normal":
                drawn[index] = normal_features(heads, count, dim, generator)
            else:
                drawn[index] = leverage_features(points, count, self.tolerance, generator=generator)
        return drawn


def degrees_of_freedom(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    tolerance: float = 2**-8,
    points: int = 1024,
    draws: int = 3,
    layers: Sequence[int] | None = None,
    center: bool = False,
    seed: int = 0,
) -> DegreesOfFreedom:
    """Measure the degrees of freedom of real queries and keys, for each layer and key head.

    Each measurement is repeated on ``draws`` disjoint draws of ``points`` queries and keys.

    Args:
        model: of transformers or timm, from a family that can be converted; a converted model is measured as it was
            before.
        batches: token ids ``(B, T)`` or pictures, or dicts of the model's arguments.
        tolerance: lambda, in units of the largest eigenvalue; the paper has 2^-4 for GPT-2 and 2^-8 for Pythia-1B.
        center: subtract the mean key from all keys first. This changes the kernel, but not softmax attention.
    """
    check_integer("points", points, 1)
    check_integer("draws", draws, 1)
    samples: dict[int, Reservoir] = {}

    def see(seen: Observation) -> None:
        if layers is None or seen.layer_idx in layers:
            sample = samples.setdefault(seen.layer_idx, Reservoir(points * draws, seed))
            sample.add(seen.q, seen.k, seen.key_mask)

    watch(model, batches, see)
    measured = {}
    for index, sample in sorted(samples.items()):
        drawn, mean = sample.draws(draws, center=center), sample.key_mean()
        values = torch.stack([kernel_degrees(draw, tolerance) for draw in drawn])
        std = values.std(0, correction=int(draws > 1))
        center_of = mean if center else torch.zeros_like(mean)
        measured[index] = MeasuredLayer(values.mean(0), std, drawn[-1], center_of, sample.keys())
    return DegreesOfFreedom(measured, tolerance)


def measured(
    model: nn.Module, batches: Batches, layers: Sequence[int], tolerance: float = TOLERANCE
) -> DegreesOfFreedom:
    """Degrees of freedom of some layers, measured on the first batches of a training.

    The mean key is subtracted from the keys, which does not change softmax attention: in pretrained models it makes up
    most of their length, and features of long vectors hardly overlap.
    """
    seen = [batches(step) for step in range(MEASURED_BATCHES)]
    return degrees_of_freedom(model, seen, tolerance=tolerance, points=POINTS, draws=DRAWS, layers=layers, center=True)


def start_features(model: nn.Module, degrees: DegreesOfFreedom, seed: int) -> None:
    """Redraw the random features of a converted model, by ``degrees.start`` with its defaults; other features stay."""
    maps = {number: getattr(layer.core, "features", None) for number, layer in linearized_layers(model).items()}
    dims = {number: map_.num_features for number, map_ in maps.items() if isinstance(map_, RandomFeatures)}
    install_features(model, degrees.start(dims, seed), degrees)


@torch.no_grad()
def install_features(model: nn.Module, features: dict[int, PositiveFeatures], measured: DegreesOfFreedom) -> None:
    """Put ``features`` into the layers of a converted model whose plan says ``features="prf"``.

    The unit of a head's key features is the median, over keys, of the largest feature: much larger or smaller features
    would overflow or vanish in fp32.
    """
    layers = linearized_layers(model)
    for index, drawn in features.items():
        maps = getattr(layers[index].core, "features", None) if index in layers else None
        if not isinstance(maps, RandomFeatures) or maps.z.shape != drawn.z.shape:
            raise ValueError(
                f"layer {index} must be converted with features='prf' and feature_dim={drawn.number}, it is "
                f"{'not converted' if index not in layers else maps}"
            )
        layer = measured.layers[index]
        maps.z.copy_(drawn.z)
        maps.log_alpha.copy_(drawn.log_alpha)
        maps.center.copy_(layer.center)
        logs = log_features(scaled(layer.keys - layer.center.unsqueeze(1)), PositiveFeatures(*(x.cpu() for x in drawn)))
        maps.log_unit.copy_(logs.amax(-1).median(-1).values)
