"""What a converted model of transformers needs around it: its plan in the config, masks, hooks and a cache of states.

Masks say which keys are real, ``(B, T)``, without a matrix of pairs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, compiler, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from linattn.models.language.hf.cache import StateLayer, map_tensors
from linattn.models.language.hf.inputs import check_past, offsets_of_positions, positions_of
from linattn.ops.hybrid.decoding import NEWEST_REAL, DecodingState, whole

LINEARIZED = "linattn_linearized"
NOT_PACKED = "converted layers know no packed sequences: give each text a row of its own with attention_mask"
REFUSED = (
    "linear attention knows causal and bidirectional masks with padding; this model asks for another pattern: a "
    "sliding window shorter than the text, packed sequences (pass attention_mask), or a mask of its own"
)
WINDOWS = ("sliding_window", "attention_chunk_size")  # names of options in configs


class CoreLayer(StateLayer):
    """The state of one layer's core, and how many tokens it has seen, counting padding."""

    held: Any = None  # the state, or the form of it that decoding uses

    @property
    def state(self) -> Any:
        """The state in the form that every call of the core takes."""
        return whole(self.held) if isinstance(self.held, DecodingState) else self.held

    @state.setter
    def state(self, state: Any) -> None:
        self.held = state

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.held, self.padding = map_tensors(change, self.held), map_tensors(change, self.padding)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError(
            "this cache holds the states of converted layers, and exact attention needs all keys and values: begin "
            "with an empty cache after a change of mode"
        )


def core_layer(cache: Any, layer_idx: int, *, masked: bool) -> CoreLayer:
    """The layer of ``cache`` for a converted attention; on first use it replaces the layer of transformers.

    Without a mask, a cache that has read padding is refused where other layers keep its keys and would see them.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values must be a Cache of transformers, got {type(cache).__name__}")
    if getattr(cache, "offloading", False):
        raise ValueError("cache_implementation='offloaded' moves keys and values, and a state has none; use None")
    while len(cache.layers) <= layer_idx:  # DynamicCache() without a config grows layer by layer
        new: Any = cache.layer_class_to_replicate
        if new is None:
            raise ValueError(f"past_key_values has {len(cache.layers)} layers, but the model has layer {layer_idx}")
        cache.layers.append(new())
    layer: Any = cache.layers[layer_idx]
    if not isinstance(layer, CoreLayer):
        if layer.is_initialized and layer.get_seq_length():
            raise ValueError("past_key_values holds keys and values of exact attention; begin with an empty cache")
        layer = cache.layers[layer_idx] = CoreLayer()
    if not masked and layer.padding is not None and not all(isinstance(each, CoreLayer) for each in cache.layers):
        raise ValueError(
            "attention_mask must be given, (batch, past + tokens) with 0 at padding: this cache has read padding, and "
            "layers that were not converted keep its keys and would see them"
        )
    return layer


def tell_transformers(model: Any, plan: dict[str, Any], *, positions_from_mask: bool) -> None:
    """Put the plan into the config, which is saved, and set up masks ``(B, T)``, checks of arguments and positions."""
    register_linearized()
    model.config._attn_implementation = LINEARIZED
    model.config.linearize = plan
    model._is_stateful = True  # a state cannot go back: no assisted decoding
    inner = getattr(model, "base_model", model)  # this part is called whichever head or wrapper is around it
    for hook in (refuse, *([count_real_tokens] if positions_from_mask else [])):
        inner.register_forward_pre_hook(hook, with_kwargs=True)


def refuse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: refuse ``output_attentions``, which transformers would silently ignore, and packed texts.

    Positions that restart inside a row stand for these; with a cache this is checked only where that costs nothing.
    """
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True is not possible: a converted layer never has its weights. Ask the model before its "
            "conversion, loaded with attn_implementation='eager'"
        )
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


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Return the 2-D mask unchanged: ``(B, seen)``, True = real token; None: all ``kv_length`` keys are real.

    ``seen`` counts all tokens so far, padding included; a static cache has more slots than that. Layers that keep their
    window get the pattern ``(B, 1, Tq, Tk)`` of that window.
    """
    seen = kv_length if mask_function is bidirectional_mask_function else int(q_offset) + q_length
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        # Without a window in the config no layer has one: the pattern would reach converted layers.
        if all(getattr(options.get("config"), name, None) is None for name in WINDOWS):
            raise ValueError(REFUSED)
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset,  # type: ignore[arg-type]
            mask_function=mask_function, attention_mask=attention_mask, **(options | skips),
        )  # fmt: skip
    if attention_mask is None:
        real = torch.ones(batch_size, seen, dtype=torch.bool, device=options.get("device"))
        return None if seen == kv_length else _marked(real)
    if attention_mask.ndim != 2 or attention_mask.shape[1] != seen:
        given = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask must be (B, {seen}), one entry per token so far, got {given}")
    real = attention_mask.bool().detach()  # a tensor of its own, never the caller's
    all_real, newest_real = torch.stack([real.all(), real[:, -q_length:].all()]).tolist()
    if seen == kv_length and all_real:
        return None
    return _marked(real) if newest_real else real


def _marked(mask: Tensor) -> Tensor:
    """Mark a mask whose newest tokens are all real, so that layers need not read this off the device again."""
    setattr(mask, NEWEST_REAL, True)
    return mask


def register_linearized() -> None:
    """Register ``linattn_linearized``: its mask is the 2-D one, and layers that were not converted use softmax."""
    AttentionInterface.register(LINEARIZED, softmax_attention)
    AttentionMaskInterface.register(LINEARIZED, padding_mask)


def softmax_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Softmax for the layers that were not converted, with the 2-D mask that converted layers use.

    The last query belongs to the last token seen.
    """
    if asked := [name for name in ("softcap", "s_aux") if options.get(name) is not None]:
        raise ValueError(f"{LINEARIZED} does not support what this model asks of its attention: {', '.join(asked)}")
    q_length, kv_length, causal = query.shape[2], key.shape[2], options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    mask = attention_mask
    if mask is None and causal and q_length not in (1, kv_length):
        mask = torch.ones(1, kv_length, dtype=torch.bool)
    if mask is not None and mask.ndim == 2:
        seen = mask.shape[1]
        visible = torch.ones(q_length, seen, dtype=torch.bool, device=mask.device)
        visible = (visible.tril(seen - q_length) if causal else visible)[None, None] & mask.bool()[:, None, None, :]
        mask = torch.nn.functional.pad(visible, (0, kv_length - seen)).to(query.device)
    return sdpa_attention_forward(module, query, key, value, mask, **options)
