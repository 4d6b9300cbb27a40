"""What attention does in each layer and head of a model, in numbers, and where in the image a patch looks."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linattn.analysis.attention_map import attention_map, attention_row
from linattn.analysis.capture import CapturedCall, capture
from linattn.analysis.entropy import effective_rank, entropy, entropy_norm_correlation, positive_sequence_entropy
from linattn.analysis.truncation import energy_shares, energy_sums, opposed_kept

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
        """As plain values, for JSON."""
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
        # Entropies, those of positive parts and norms of queries, (B, H, T) each; ranks (B, H).
        self.parts: list[tuple[Tensor, ...]] = []

    def add(self, call: CapturedCall) -> None:
        arguments = call.map_arguments()
        (B, H, Tq, _), Tk = call.q.shape, call.k.shape[2]
        x, images = arguments.pop("x"), max(1, MAP_NUMBERS // (H * Tq * Tk))
        for start in range(0, B, images):
            own = slice(start, start + images)
            q, k, of_x = call.q[own], call.k[own], None if x is None else x[own]
            weights, norm = (
                attention_map(call.mechanism, q, k, x=of_x, **arguments),
                torch.linalg.vector_norm(q, dim=-1),
            )
            found = entropy(weights), positive_sequence_entropy(weights), norm, effective_rank(weights)
            self.parts.append(tuple(t.cpu() for t in found))
        self.energy += torch.stack(energy_sums(call.mechanism, call.q, call.k, rotate=arguments["rotate"]))

    def statistics(self) -> LayerStatistics:
        entropies, positive, norms, ranks = map(torch.cat, zip(*self.parts, strict=True))
        return LayerStatistics(
            layer=self.name,
            entropy=entropies.double().mean((0, 2)).tolist(),
            entropy_norm_correlation=entropy_norm_correlation(entropies, norms),
            positive_sequence_entropy=positive.double().mean((0, 2)).tolist(),
            effective_rank=ranks.double().mean(0).tolist(),
            energy_lost=energy_shares(*self.energy),
            opposed_kept=self.opposed,
        )


def token_heat_map(
    model: nn.Module, image: Tensor, *, layer: int | str = -1, token: int | None = None, head: int | None = None
) -> Tensor:
    """Attention weights of one patch over the image plane: ``(rows, columns)`` of the keys.

    This is the patch's row of the attention map, averaged over heads unless one is chosen. The columns of class tokens
    are left out, so their share is missing in its sum. With spatial reduction the plane is the reduced one.

    Args:
        model: a vision model whose layers are ``linattn.layers.Attention``.
        image: ``(C, height, width)`` or ``(1, C, height, width)``, normalised, on the model's device.
        layer: name of the attention layer, or its index among the attention layers.
        token: the patch, counted row by row from 0, without class tokens (None: the one in the centre).
        head: number of the head, from 0 (None: the mean over all heads).

    Example:
        >>> import torch
        >>> from linattn.models.vision import create_vit
        >>> model = create_vit("digits", "mirror")
        >>> token_heat_map(model, torch.randn(1, 16, 24), layer="blocks.1.attn", token=0).shape
        torch.Size([8, 12])
    """
    image = image.unsqueeze(0) if image.ndim == 3 else image
    if image.ndim != 4 or len(image) != 1:
        raise ValueError(f"image must be one image (C, height, width), got shape {tuple(image.shape)}")
    calls = capture(model, image)
    names = [call.name for call in calls]
    number = names.index(layer) if isinstance(layer, str) and layer in names else layer
    if not isinstance(number, int) or not -len(calls) <= number < len(calls):
        allowed = f"one of {', '.join(names)} or a number from {-len(calls)} to {len(calls) - 1}"
        raise ValueError(f"layer must be {allowed}, got {layer!r}")
    call = calls[number]
    if call.grid is None or call.key_grid is None:
        raise ValueError(f"layer {call.name} was not told the plane of its tokens, so no image plane is known")
    (height, width), (key_height, key_width) = call.grid, call.key_grid
    patches, heads = height * width, call.q.shape[1]
    for name, value, count in (("token", token, patches), ("head", head, heads)):
        if value is not None and (type(value) is not int or not 0 <= value < count):
            raise ValueError(f"{name} must be an integer from 0 to {count - 1}, got {value!r}")
    token = height // 2 * width + width // 2 if token is None else token
    prefix, key_prefix = call.q.shape[2] - patches, call.k.shape[2] - key_height * key_width
    row = attention_row(call.mechanism, call.q, call.k, prefix + token, **call.map_arguments())[0]
    own = row.mean(0) if head is None else row[head]
    return own[key_prefix:].unflatten(0, call.key_grid)
