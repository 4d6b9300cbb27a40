"""Forward pre-hooks of converted models that count missing positions and refuse unsupported arguments."""

from typing import Any

import torch
from torch import Tensor, nn

from linattn.convert.hf.cache import CoreLayer
from linattn.models.language.hf.inputs import check_past, offsets_of_positions, positions_of

NOT_PACKED = "converted layers know no packed sequences: give each text a row of its own with attention_mask"


def refuse_weights(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: refuse ``output_attentions``, which transformers would silently ignore in converted layers."""
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True is not possible: a converted layer never has its weights. Ask the model before its "
            "conversion, loaded with attn_implementation='eager'"
        )


def refuse_packed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: refuse positions that restart inside a row, which stand for texts packed together.

    With a cache this is checked only where that costs nothing.
    """
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[1] == 1:
        return
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return  # a mask of pairs says who sees whom itself, and the layers check it
        mask = mask[:, -positions.shape[1] :].to(positions.device)
    readable = positions.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable or kwargs.get("past_key_values") is None:
        offsets_of_positions(positions, mask, len(positions), NOT_PACKED)


def count_real_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a decoder: positions count real tokens only, as in ``generate``.

    Which tokens are real is read from a mask ``(B, T)`` or, without one, from the cache for the tokens it has read.
    Features of rotated keys depend on where positions start, so padding in front would otherwise change the result.
    """
    mask = kwargs.get("attention_mask")
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    plain = isinstance(mask, Tensor) and mask.ndim == 2
    if tokens is None or not (mask is None or plain):
        return args, kwargs
    read = _telling_layer(kwargs.get("past_key_values"))
    past, padding = (0, None) if read is None else (read.length, read.padding)
    if tokens.shape[1] > 1:
        check_past(mask, read)
    if kwargs.get("position_ids") is None and (plain or padding is not None):
        positions = positions_of(mask, None, tokens.shape[1], past, tokens.device, padding)
        kwargs = kwargs | {"position_ids": positions.to(tokens.device)}
    return args, kwargs


def _telling_layer(cache: Any) -> CoreLayer | None:
    """A converted layer of the cache, which knows how much of the text was padding: all have read the same tokens."""
    layers = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, CoreLayer)]
    return next((layer for layer in layers if layer.padding is not None), layers[0] if layers else None)
