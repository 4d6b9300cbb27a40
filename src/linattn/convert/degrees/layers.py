"""Learns random features for all layers of a model at once, and puts them into a converted model."""

from collections.abc import Iterable

import torch
from torch import nn

from linattn.convert.degrees.kernel import PositiveFeatures, log_features, scaled
from linattn.convert.degrees.learn import FeatureLearner, LearnOptions
from linattn.convert.degrees.measure import DegreesOfFreedom
from linattn.convert.degrees.observe import Batch, SeenPairs, watch
from linattn.convert.layer.attention import linearized_layers
from linattn.convert.layer.features import RandomFeatures


def learn_layers(
    model: nn.Module,
    batches: Iterable[Batch],
    start: dict[int, PositiveFeatures],
    measured: DegreesOfFreedom,
    options: LearnOptions,
) -> dict[int, FeatureLearner]:
    """Learn the features of every layer in ``start`` on the queries and keys that the model computes.

    One pass of the model over a batch is one step of every layer. Keys are centred as those of ``measured`` were. The
    learners that are returned also hold the curves of their losses.
    """
    device = next(model.parameters()).device
    learners = {
        index: FeatureLearner(PositiveFeatures(*(part.to(device) for part in features)), options)
        for index, features in start.items()
    }
    centers = {index: measured.layers[index].center.to(device).unsqueeze(1) for index in start}

    def see(pairs: SeenPairs) -> None:
        if pairs.layer_idx in learners:
            learners[pairs.layer_idx].step(pairs.q, pairs.k - centers[pairs.layer_idx], pairs.key_mask)

    watch(model, batches, see, options.steps)
    return learners


@torch.no_grad()
def install_features(model: nn.Module, features: dict[int, PositiveFeatures], measured: DegreesOfFreedom) -> None:
    """Put ``features`` into the layers of a converted model whose plan says ``features="prf"``.

    The unit of a head's key features is the median, over keys, of the largest feature: much larger or smaller features
    would overflow or vanish in fp32.
    """
    layers = linearized_layers(model)
    for index, own in features.items():
        maps = getattr(layers[index].core, "features", None) if index in layers else None
        if not isinstance(maps, RandomFeatures) or maps.z.shape != own.z.shape:
            raise ValueError(
                f"layer {index} must be converted with features='prf' and feature_dim={own.number}, it is "
                f"{'not converted' if index not in layers else maps}"
            )
        layer = measured.layers[index]
        maps.z.copy_(own.z)
        maps.log_alpha.copy_(own.log_alpha)
        maps.center.copy_(layer.center)
        logs = log_features(scaled(layer.keys - layer.center.unsqueeze(1)), PositiveFeatures(*(x.cpu() for x in own)))
        maps.log_unit.copy_(logs.amax(-1).median(-1).values)
