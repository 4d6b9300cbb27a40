"""The cache of a language model: a state for each layer, in the classes of transformers, and in files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from linattn.models.language.block import Block, BlockState
from linattn.support.files import write_atomically

PADDING = "padding"  # name of the tensor that counts the padding of each row


class StateLayer(CacheLayerMixin):
    """What one block remembers: its :class:`BlockState` and ``length``, the tokens read so far, padding included.

    ``padding (B,)``: how many of these were padding (None: none), needed for the positions of the tokens that follow.
    All blocks read the same tokens, so only the first layer keeps it.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    padding: Tensor | None = None

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
        self.state, self.length, self.padding = None, 0, None

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


def save_cache(cache: Cache, path: str | Path) -> None:
    """Write the states of all layers of a cache to a safetensors file, for :func:`load_cache`.

    Example:
        >>> import tempfile, torch
        >>> from linattn.models import language
        >>> config = language.LinearAttentionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = language.LinearAttentionForCausalLM(config).eval()
        >>> text, file = torch.arange(6).unsqueeze(0), tempfile.mktemp()
        >>> language.save_cache(model(text[:, :4], use_cache=True).past_key_values, file)
        >>> rest = model(text[:, 4:], past_key_values=language.load_cache(file, model)).logits
        >>> torch.allclose(rest, model(text).logits[:, 4:], atol=1e-5)
        True
    """
    layers = state_layers(cache, len(getattr(cache, "layers", ())))
    if not layers or any(layer.state is None for layer in layers):
        raise ValueError("the cache is empty: run the model over a text first")
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        _flatten(f"{index}", layer.state, tensors)
    padding = layers[0].padding
    tensors[PADDING] = torch.zeros(layers[0].batch_size, dtype=torch.long) if padding is None else padding.clone()
    lengths = {"lengths": json.dumps([layer.length for layer in layers])}
    write_atomically(Path(path), lambda temporary: save_file(tensors, temporary, lengths))


def load_cache(path: str | Path, model: PreTrainedModel) -> Cache:
    """Load a cache that :func:`save_cache` wrote for the same ``model``, onto the device of the model."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    try:
        with safe_open(path, "pt", device=str(model.device)) as file:
            lengths = json.loads((file.metadata() or {}).get("lengths", "[]"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except SafetensorError as error:
        raise ValueError(f"path must be a file that save_cache wrote, and {path} is none: {error}") from error
    if len(lengths) != len(blocks):
        raise ValueError(f"{path} holds the states of {len(lengths)} layers, but the model has {len(blocks)}")
    layers = []
    for index, (block, length) in enumerate(zip(blocks, lengths, strict=True)):
        kinds = {f"{index}.mechanism": block.attn.mechanism.state_type}
        layers.append(StateLayer(_unflatten(f"{index}", BlockState, tensors, kinds), length))
        _check_canon(path, index, block, layers[-1].state)
    if PADDING not in tensors:
        raise ValueError(f"path must be a file that save_cache wrote, and {path} does not count its padding")
    padding = tensors.pop(PADDING)
    layers[0].padding = padding if bool(padding.any()) else None
    if tensors:
        raise ValueError(f"{path} is the state of another model: nothing here has a place for {', '.join(tensors)}")
    return Cache(layers=[*layers])


def _check_canon(path: str | Path, index: int, block: Block, state: BlockState | None) -> None:
    """Raise unless the file has last tokens for exactly the model's Canon layers; others would silently restart."""
    layers = {"a": block.canon_a, "b": block.attn.canon, "c": block.canon_c, "d": block.mlp.canon}
    for letter, canon in layers.items():
        found = getattr(state, f"canon_{letter}", None)
        wanted = None if canon is None else (canon.weight.shape[1] - 1, canon.weight.shape[0])
        given = None if found is None else tuple(found.inputs.shape[1:])
        if given != wanted:
            raise ValueError(
                f"{path} is the state of another model: Canon layer {letter} of layer {index} has (tokens, channels) = "
                f"{given} there and {wanted} in the model"
            )


def _flatten(name: str, state: Any, tensors: dict[str, Tensor]) -> None:
    if isinstance(state, Tensor):
        tensors[name] = state.clone(memory_format=torch.contiguous_format)  # layers may share one, as of padding
    elif state is not None:
        for field, part in zip(state._fields, state, strict=True):
            _flatten(f"{name}.{field}", part, tensors)


def _unflatten(name: str, kind: type, tensors: dict[str, Tensor], kinds: dict[str, type]) -> Any:
    """Build the named tuple ``kind`` from the tensors below ``name``, removing them; None for fields without any."""
    parts: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for field in kind._fields:  # type: ignore[attr-defined]
        own = f"{name}.{field}"
        if own in tensors:
            parts[field] = tensors.pop(own)
        elif any(key.startswith(f"{own}.") for key in tensors):
            allowed = get_args(hints[field]) or (hints[field],)
            inner = kinds.get(own) or next(one for one in allowed if hasattr(one, "_fields"))
            parts[field] = _unflatten(own, inner, tensors, kinds)
        else:
            parts[field] = None
    return kind(**parts)
