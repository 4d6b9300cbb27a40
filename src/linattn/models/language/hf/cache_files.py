"""Caches in files: read a long text once, and continue from its state at any time."""

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from linattn.models.language.hf.cache import StateLayer, state_layers
from linattn.models.language.hf.model import CachedBlock
from linattn.models.language.tokens import BlockState
from linattn.support.files import write_atomically

PADDING = "padding"  # name of the tensor that counts the padding of each row; older files have none


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
    if layers[0].counted:
        padding = layers[0].padding
        tensors[PADDING] = torch.zeros(layers[0].batch_size, dtype=torch.long) if padding is None else padding.clone()
    lengths = {"lengths": json.dumps([layer.length for layer in layers])}
    write_atomically(Path(path), lambda temporary: save_file(tensors, temporary, lengths))


def load_cache(path: str | Path, model: PreTrainedModel) -> Cache:
    """Load a cache that :func:`save_cache` wrote for the same ``model``, onto the device of the model."""
    blocks = [module for module in model.modules() if isinstance(module, CachedBlock)]
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
    padding = tensors.pop(PADDING, None)
    layers[0].counted = padding is not None
    if padding is not None and bool(padding.any()):
        layers[0].padding = padding
    if tensors:
        raise ValueError(f"{path} is the state of another model: nothing here has a place for {', '.join(tensors)}")
    return Cache(layers=[*layers])


def _check_canon(path: str | Path, index: int, block: CachedBlock, state: BlockState | None) -> None:
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
