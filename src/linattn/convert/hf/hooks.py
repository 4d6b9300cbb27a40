"""What a converted model of transformers needs around it: its plan in the config, masks, and hooks on its arguments."""

from typing import Any

from torch import Tensor, compiler, nn

from linattn.convert.hf.cache import CoreLayer
from linattn.convert.hf.interface import LINEARIZED, register_linearized
from linattn.models.language.hf.inputs import check_past, offsets_of_positions, positions_of

NOT_PACKED = "converted layers know no packed sequences: give each text a row of its own with attention_mask"


def tell_transformers(model: Any, plan: dict[str, Any], *, positions_from_mask: bool) -> None:
    """Put the plan into the config, which is saved, and set up masks ``(B, T)``, checks of arguments and positions."""
    register_linearized()
    model.config._attn_implementation = LINEARIZED
    model.config.linearize = plan
    model._is_stateful = True  # a state cannot go back: no assisted decoding
    inner = getattr(model, "base_model", model)  # this part is called whichever head or wrapper is around it
    for hook in (refuse_weights, refuse_packed, *([count_real_tokens] if positions_from_mask else [])):
        inner.register_forward_pre_hook(hook, with_kwargs=True)


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
    readable = positions.device.type == "cpu" and not compiler.is_compiling()
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
    # All converted layers of a cache have read the same tokens; the first that noted padding knows how much it was.
    layers = [each for each in getattr(kwargs.get("past_key_values"), "layers", ()) if isinstance(each, CoreLayer)]
    read = next((each for each in layers if each.padding is not None), layers[0] if layers else None)
    past, padding = (0, None) if read is None else (read.length, read.padding)
    if tokens.shape[1] > 1:
        check_past(mask, read)
    if kwargs.get("position_ids") is None and (plain or padding is not None):
        positions = positions_of(mask, None, tokens.shape[1], past, tokens.device, padding)
        kwargs = kwargs | {"position_ids": positions.to(tokens.device)}
    return args, kwargs
