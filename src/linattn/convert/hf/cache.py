"""Cache of transformers whose layers hold the state of a converted layer instead of keys and values."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from linattn.models.language.hf.cache import StateLayer, map_tensors
from linattn.ops.hybrid.decoding import DecodingState, whole


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

    def advance(self, state: Any, tokens: int) -> None:
        """Store the state after ``tokens`` more tokens."""
        self.held, self.length = state, self.length + tokens

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.held, self.padding = map_tensors(change, self.held), map_tensors(change, self.padding)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError(
            "this cache holds the states of converted layers, and exact attention needs all keys and values: begin "
            "with an empty cache after a change of mode"
        )


def core_layer(cache: Any, layer_idx: int) -> CoreLayer:
    """The layer of ``cache`` for a converted attention; on first use it replaces the layer of transformers."""
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
    if isinstance(layer, CoreLayer):
        return layer
    if layer.is_initialized and layer.get_seq_length():
        raise ValueError("past_key_values holds keys and values of exact attention; begin with an empty cache")
    own = CoreLayer()
    cache.layers[layer_idx] = own
    return own


def check_hidden(cache: Any) -> None:
    """Refuse to run layers that were not converted, without a mask, on a cache that has read padding."""
    if not all(isinstance(layer, CoreLayer) for layer in cache.layers):
        raise ValueError(
            "attention_mask must be given, (batch, past + tokens) with 0 at padding: this cache has read padding, and "
            "layers that were not converted keep its keys and would see them"
        )
