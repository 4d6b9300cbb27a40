"""The cache of a language model: a state for each layer, in the classes of transformers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from linattn.models.language.tokens import BlockState


class StateLayer(CacheLayerMixin):
    """What one block remembers: its :class:`BlockState` and ``length``, the tokens read so far, padding included.

    ``padding (B,)``: how many of these were padding (None: none), needed for the positions of the tokens that follow.
    All blocks read the same tokens, so only the first layer keeps it. ``counted``: whether the padding is known; it is
    not after loading an older file.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    padding: Tensor | None = None
    counted = True

    def __init__(self, state: BlockState | None = None, length: int = 0) -> None:
        super().__init__()
        self.state, self.length = state, length

    @property
    def batch_size(self) -> int:
        if self.state is None:
            raise AttributeError("an empty state has no batch size yet")
        return _first_tensor(self.state).shape[0]

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1  # no limit

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        self.state, self.length, self.padding, self.counted = None, 0, None, True

    def note_padding(self, key_mask: Tensor | None) -> None:
        """Add the padding among the tokens just read; ``key_mask (B, T)``, True = real (None: all are)."""
        if key_mask is not None:
            hidden = (~key_mask).sum(-1)
            self.padding = hidden if self.padding is None else self.padding + hidden

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"a recurrent state cannot go {abs(tokens_to_remove)} tokens back: assisted generation needs a model "
                "whose cache can be cut"
            )

    def offload(self) -> None:
        raise ValueError("a state is not offloaded: leave cache_implementation at None")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a StateLayer holds the state of a block, which sets it itself")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("a StateLayer takes no keys and values: they go into the state of a mechanism")

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state, self.padding = map_tensors(change, self.state), map_tensors(change, self.padding)


def map_tensors(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Apply ``change`` to every tensor of a tree of named tuples."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, tuple):
        parts = [map_tensors(change, part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def _first_tensor(state: Any) -> Tensor:
    return state if isinstance(state, Tensor) else next(_first_tensor(part) for part in state if part is not None)


def state_layers(cache: Any, num_layers: int) -> list[StateLayer]:
    """The state layers of ``cache``; in an empty cache made by transformers they replace its layers for keys."""
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values must be a Cache of transformers, got {type(cache).__name__}")
    if getattr(cache, "offloading", False):
        raise ValueError("cache_implementation='offloaded' moves keys and values, and a state has none; use None")
    layers = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
    if not layers:
        for layer in cache.layers:
            if type(layer) is not DynamicLayer:
                kind = type(layer).__name__
                raise TypeError(f"past_key_values must be a DynamicCache, whose place a state takes, got a {kind}")
            if layer.get_seq_length():
                raise ValueError("past_key_values holds keys and values of another model; pass an empty DynamicCache()")
        layers = [StateLayer() for _ in range(num_layers)]
        cache.layers = [*layers]
    if len(layers) != num_layers:
        raise ValueError(f"past_key_values has {len(layers)} layers, but the model has {num_layers}")
    return layers


def new_cache(num_layers: int) -> Cache:
    """An empty cache for ``num_layers`` blocks."""
    return Cache(layers=[StateLayer() for _ in range(num_layers)])
