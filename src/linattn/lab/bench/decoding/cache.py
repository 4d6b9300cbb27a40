"""Softmax with a key-value cache that is allocated once, as the fair comparison for linear attention.

The library's own softmax appends every new token to its cache, which copies all of it. With this cache a token is
written into its slot, and attention reads the slots that are filled: no copy, no mask, and nothing that a CUDA graph
cannot hold.
"""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import tree_leaves, tree_map_only

from linattn.lab.bench.language.model import TextModel
from linattn.layers.attention import Attention
from linattn.mechanisms.base import Call, MechanismOutput
from linattn.mechanisms.softmax import Softmax
from linattn.models.language.block import BlockState


class StaticCache(NamedTuple):
    """Keys and values ``(B, H_kv, room, D)``, of which the first ``length`` slots are filled."""

    keys: Tensor
    values: Tensor
    length: int


class CachedSoftmax(Softmax):
    """:class:`Softmax` whose state is a :class:`StaticCache`, written in place."""

    state_type: ClassVar[type] = StaticCache

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        if not call.need_state:
            return super().attend(q, k, v, call)
        keys, values, start = call.state
        end = start + k.shape[2]
        if end > keys.shape[2]:
            raise ValueError(f"the cache has room for {keys.shape[2]} tokens, and {end} were given")
        keys[:, :, start:end].copy_(k)
        values[:, :, start:end].copy_(v)
        options: dict[str, Any] = {"scale": self.scale, "enable_gqa": self._grouped}
        if q.shape[2] > 1:  # the last query belongs to the last key
            options |= {"attn_mask": causal_lower_right(q.shape[2], end)} if start else {"is_causal": True}
        out = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], **options)
        return MechanismOutput(out, StaticCache(keys, values, end))


def use_static_cache(model: TextModel) -> None:
    """Give every softmax of the model a :class:`StaticCache`."""
    for attention in _attentions(model):
        old = attention.mechanism
        if type(old) is Softmax:
            attention.mechanism = CachedSoftmax(
                old.num_heads, old.head_dim, scale=old.scale, num_kv_heads=old.num_kv_heads, causal=True
            )


def empty_states(model: TextModel, batch: int, room: int) -> list[BlockState | None]:
    """States before the first token; caches get ``room`` slots."""
    states: list[BlockState | None] = []
    weight = model.embedding.weight
    for attention in _attentions(model):
        mechanism = attention.mechanism
        if isinstance(mechanism, CachedSoftmax):
            shape = (2, batch, mechanism.num_kv_heads, room, mechanism.head_dim)
            keys, values = weight.new_empty(shape).unbind()
            states.append(BlockState(StaticCache(keys, values, 0)))
        else:
            states.append(None)
    return states


def _attentions(model: TextModel) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def spread(states: list[BlockState], batch: int, room: int) -> list[BlockState]:
    """Copy the states of one sequence for a batch of them; caches get ``room`` free slots."""
    return [_spread(state, batch, room) for state in states]


def _spread(state: BlockState, batch: int, room: int) -> BlockState:
    cache = state.mechanism
    if not isinstance(cache, StaticCache):
        own: BlockState = tree_map_only(Tensor, lambda x: x.expand(batch, *x.shape[1:]).clone(), state)
        return own
    filled = []
    for old in (cache.keys, cache.values):
        new = old.new_empty(batch, old.shape[1], cache.length + room, old.shape[3])
        new[:, :, : cache.length] = old[:, :, : cache.length]
        filled.append(new)
    return state._replace(mechanism=StaticCache(filled[0], filled[1], cache.length))


def state_bytes(states: list[BlockState]) -> int:
    """Bytes of the states; free slots of a cache do not count."""
    total = 0
    for state in states:
        cache = state.mechanism
        if isinstance(cache, StaticCache):
            total += 2 * cache.keys[:, :, : cache.length].numel() * cache.keys.element_size()
        else:
            total += sum(x.nbytes for x in tree_leaves(state) if isinstance(x, Tensor))
    return total


def overwrite(states: list[BlockState], new: list[BlockState]) -> None:
    """Copy new states into the memory of old ones; a cache was written in place and stays."""
    old_tensors = [x for x in tree_leaves(states) if isinstance(x, Tensor)]
    new_tensors = [x for x in tree_leaves(new) if isinstance(x, Tensor)]
    pairs = [(a, b) for a, b in zip(old_tensors, new_tensors, strict=True) if a is not b]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
