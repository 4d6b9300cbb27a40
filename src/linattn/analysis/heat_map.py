"""Where in the image a patch looks."""

from torch import Tensor, nn

from linattn.analysis.attention_row import attention_row
from linattn.analysis.capture import CapturedCall, capture


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
    call = _choose(capture(model, image), layer)
    if call.grid is None or call.key_grid is None:
        raise ValueError(f"layer {call.name} was not told the plane of its tokens, so no image plane is known")
    (height, width), (key_height, key_width) = call.grid, call.key_grid
    patches, heads = height * width, call.q.shape[1]
    token = height // 2 * width + width // 2 if token is None else _checked("token", token, patches)
    prefix, key_prefix = call.q.shape[2] - patches, call.k.shape[2] - key_height * key_width
    row = attention_row(call.mechanism, call.q, call.k, prefix + token, **call.map_arguments())[0]
    own = row.mean(0) if head is None else row[_checked("head", head, heads)]
    return own[key_prefix:].unflatten(0, call.key_grid)


def _choose(calls: list[CapturedCall], layer: int | str) -> CapturedCall:
    names = [call.name for call in calls]
    if isinstance(layer, str) and layer in names:
        return calls[names.index(layer)]
    if isinstance(layer, int) and -len(calls) <= layer < len(calls):
        return calls[layer]
    raise ValueError(
        f"layer must be one of {', '.join(names)} or a number from {-len(calls)} to {len(calls) - 1}, got {layer!r}"
    )


def _checked(name: str, value: int, count: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ValueError(f"{name} must be an integer from 0 to {count - 1}, got {value!r}")
    return value
