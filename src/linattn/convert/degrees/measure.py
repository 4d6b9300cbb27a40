"""Measures the degrees of freedom of every layer and head of a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from linattn.convert.degrees.gram import kernel_degrees
from linattn.convert.degrees.kernel import PositiveFeatures, normal_features
from linattn.convert.degrees.leverage import leverage_features
from linattn.convert.degrees.observe import Batch, SeenPairs, watch
from linattn.convert.degrees.points import Reservoir
from linattn.support.options import OptionError, check_option

REDUCE = ("max", "p90", "mean")
SAMPLINGS = ("normal", "leverage")


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

    def values(self, reduce: str = "max") -> dict[int, float]:
        """One number per layer, for ``allocate``: the largest of its heads (the paper), 90th percentile or mean."""
        check_option("reduce", reduce, REDUCE)
        if reduce == "p90":
            return {index: float(layer.mean.quantile(0.9)) for index, layer in self.layers.items()}
        return {
            index: float(layer.mean.max() if reduce == "max" else layer.mean.mean())
            for index, layer in self.layers.items()
        }

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
        check_option("sampling", sampling, SAMPLINGS)
        generator = Generator().manual_seed(seed)
        found = {}
        for index, count in dims.items():
            heads, _, dim = (points := self.layers[index].points).shape
            if sampling == "normal":
                found[index] = normal_features(heads, count, dim, generator)
            else:
                found[index] = leverage_features(points, count, self.tolerance, generator=generator)
        return found


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
    for name, number in (("points", points), ("draws", draws)):
        if number < 1:
            raise OptionError(name, f"must be an integer >= 1, got {number}")
    found: dict[int, Reservoir] = {}

    def see(pairs: SeenPairs) -> None:
        if layers is None or pairs.layer_idx in layers:
            reservoir = found.setdefault(pairs.layer_idx, Reservoir(points * draws, seed))
            reservoir.add(pairs.q, pairs.k, pairs.key_mask)

    watch(model, batches, see)
    measured = {}
    for index, reservoir in sorted(found.items()):
        drawn, mean = reservoir.draws(draws, center=center), reservoir.key_mean()
        values = torch.stack([kernel_degrees(draw, tolerance) for draw in drawn])
        std = values.std(0, correction=int(draws > 1))
        measured[index] = MeasuredLayer(
            values.mean(0), std, drawn[-1], mean if center else torch.zeros_like(mean), reservoir.keys()
        )
    return DegreesOfFreedom(measured, tolerance)
