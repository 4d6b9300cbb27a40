"""What attention does in each layer and head of a model, in numbers."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linattn.analysis.attention_map import attention_map
from linattn.analysis.capture import CapturedCall, capture
from linattn.analysis.correlation import entropy_norm_correlation
from linattn.analysis.effective_rank import effective_rank
from linattn.analysis.energy import energy_shares, energy_sums
from linattn.analysis.entropy import entropy, positive_sequence_entropy
from linattn.analysis.heat_map import token_heat_map
from linattn.analysis.opposed import opposed_kept

__all__ = ["LayerStatistics", "model_statistics", "token_heat_map"]

IMAGES = 32  # images that the model sees at once
MAP_NUMBERS = 2**24  # in the attention maps that exist at once: 64 MiB in fp32, more only if one image has more


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer, with a number for each query head; all tokens count, also class tokens.

    Attributes:
        layer: name of the layer in the model.
        entropy: entropy of the rows of attention, in nats; mean over images and queries.
        entropy_norm_correlation: Pearson correlation over all queries of all images; None if either is constant.
        positive_sequence_entropy: as the entropy, but with negative weights cut off.
        effective_rank: effective rank of the attention map; mean over images.
        energy_lost: share of the energy of queries and keys that is truncated; 0 where nothing is.
        opposed_kept: share of sign-opposed interactions that reaches the weights; None without pairwise features.
    """

    layer: str
    entropy: list[float]
    entropy_norm_correlation: list[float | None]
    positive_sequence_entropy: list[float]
    effective_rank: list[float]
    energy_lost: list[float | None]
    opposed_kept: list[float | None]

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON.

        Example:
            >>> LayerStatistics("attn", [1.0], [None], [1.0], [2.0], [0.5], [0.0]).as_dict()["effective_rank"]
            [2.0]
        """
        return asdict(self)


def model_statistics(model: nn.Module, images: Tensor) -> list[LayerStatistics]:
    """Compute :class:`LayerStatistics` for every attention layer, in the order in which the model calls them.

    Attention maps exist for one layer and a few images at a time; ``opposed_kept`` is that of the first 32 images.

    Args:
        model: any model with linattn mechanisms; it runs in eval mode and is left as it was.
        images: ``(B, C, height, width)``, as the model takes them: normalised, and on its device.

    Example:
        >>> import torch
        >>> from linattn.models.vision import create_vit
        >>> layers = model_statistics(create_vit("digits", "relu"), torch.randn(2, 1, 8, 8))
        >>> [layer.layer for layer in layers], layers[0].opposed_kept
        (['blocks.0.attn', 'blocks.1.attn', 'blocks.2.attn'], [0.0, 0.0, 0.0])
    """
    if not len(images):
        raise ValueError("images must hold at least one image, got none")
    layers: list[_Layer] = []
    for part in images.split(IMAGES):
        calls = capture(model, part)
        if not layers:
            layers = [_Layer(call) for call in calls]
        for layer in layers:
            layer.add(calls.pop(0))  # what was counted need not be kept
    return [layer.statistics() for layer in layers]


class _Layer:
    """Sums over images, from the first call of a layer on."""

    def __init__(self, call: CapturedCall) -> None:
        arguments = call.map_arguments()
        self.name = call.name
        self.opposed = opposed_kept(call.mechanism, call.q, call.k, x=arguments["x"], rotate=arguments["rotate"])
        self.energy = torch.zeros(2, call.q.shape[1], dtype=torch.float64)  # lost and total
        self.entropies: list[Tensor] = []  # (B, H, T) each
        self.positive: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.ranks: list[Tensor] = []  # (B, H) each

    def add(self, call: CapturedCall) -> None:
        arguments = call.map_arguments()
        (B, H, Tq, _), Tk = call.q.shape, call.k.shape[2]
        x, images = arguments.pop("x"), max(1, MAP_NUMBERS // (H * Tq * Tk))
        for start in range(0, B, images):
            own = slice(start, start + images)
            weights = attention_map(
                call.mechanism, call.q[own], call.k[own], x=None if x is None else x[own], **arguments
            )
            self.entropies.append(entropy(weights).cpu())
            self.positive.append(positive_sequence_entropy(weights).cpu())
            self.norms.append(torch.linalg.vector_norm(call.q[own], dim=-1).cpu())
            self.ranks.append(effective_rank(weights).cpu())
        self.energy += torch.stack(energy_sums(call.mechanism, call.q, call.k, rotate=arguments["rotate"]))

    def statistics(self) -> LayerStatistics:
        entropies = torch.cat(self.entropies)
        return LayerStatistics(
            layer=self.name,
            entropy=entropies.double().mean((0, 2)).tolist(),
            entropy_norm_correlation=entropy_norm_correlation(entropies, torch.cat(self.norms)),
            positive_sequence_entropy=torch.cat(self.positive).double().mean((0, 2)).tolist(),
            effective_rank=torch.cat(self.ranks).double().mean(0).tolist(),
            energy_lost=energy_shares(*self.energy),
            opposed_kept=self.opposed,
        )
