"""The language model without a head: embeddings, blocks and a final norm; and what all heads share."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput

from linattn.layers.attention import Attention
from linattn.layers.canon import Canon
from linattn.layers.norms import create_norm
from linattn.layers.rotary import rotations
from linattn.models.language.block import Block, Tokens
from linattn.models.language.hf.cache import StateLayer, new_cache, state_layers
from linattn.models.language.hf.config import LinearAttentionConfig
from linattn.models.language.hf.inputs import (
    OF_A_CACHE,
    PACKING,
    check_call,
    check_past,
    check_places,
    check_rows,
    offsets_of_positions,
    positions_of,
)
from linattn.support.offloading import HOOK, weights_here

LOSS_OPTIONS = ("num_items_in_batch", "shift_labels", "ignore_index")  # of transformers; Trainer passes the first


class LinearAttentionPreTrainedModel(PreTrainedModel):
    """Base class of all models, with the initialisation of their weights."""

    config_class = LinearAttentionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CachedBlock"]  # noqa: RUF012, the type that transformers gives it
    _is_stateful = True  # a state cannot be cut back: tells transformers to refuse assisted generation

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Canon):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise mechanisms first, each as a whole: only they know how their parameters and buffers start."""
        for module in self.modules():
            if isinstance(module, Attention) and not getattr(module.mechanism, "_is_hf_initialized", False):
                _start_mechanism(module)
        super().initialize_weights()

    def _loss_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The options of the loss among a head's ``**kwargs``.

        A head that takes ``cu_seqlens`` also allows its other names. Anything else is refused.
        """
        named = list(inspect.signature(self.forward).parameters)[:-1]
        known = (*LOSS_OPTIONS, *(PACKING if "cu_seqlens" in named else ()))
        for name, value in kwargs.items():
            if name not in known and value is not None:
                raise TypeError(f"{type(self).__name__} takes no {name!r}; it takes {', '.join([*named, *known])}")
        return {name: value for name, value in kwargs.items() if name in LOSS_OPTIONS}

    def _answer(self, result: ModelOutput, return_dict: bool | None) -> Any:
        """The output with named fields, or as a tuple if ``return_dict``, or by default the config, is False."""
        by_name = self.config.return_dict if return_dict is None else return_dict
        return result if by_name else result.to_tuple()


def _start_mechanism(attention: Attention) -> None:
    """Give tensors that were not loaded from a file the values of a new mechanism, and mark all as initialised."""
    mechanism = attention.mechanism
    tensors = dict(mechanism.named_parameters()) | dict(mechanism.named_buffers())
    missing = {name: x for name, x in tensors.items() if not getattr(x, "_is_hf_initialized", False)}
    if missing:
        with torch.device("cpu"):
            fresh = attention.new_mechanism()
        values = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
        for name, x in missing.items():
            x.copy_(values[name])
    for module in mechanism.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]


class CachedBlock(GradientCheckpointingLayer, Block):
    """A block that reads its state from a layer of the cache and writes the next one back."""

    def forward(self, x: Tensor, tokens: Tokens, past: StateLayer | None = None) -> Tensor:
        if HOOK in vars(self.norm1):  # accelerate brings weights for the forward call of each part alone
            with weights_here(*self.children()):
                return self._forward(x, tokens, past)
        return self._forward(x, tokens, past)

    def _forward(self, x: Tensor, tokens: Tokens, past: StateLayer | None) -> Tensor:
        if past is None:
            return Block.forward(self, x, tokens)
        out, past.state = self.with_state(x, tokens, past.state)
        past.length += x.shape[1]
        return out


class LinearAttentionModel(LinearAttentionPreTrainedModel):
    """Maps tokens ``(B, T)`` to hidden states ``(B, T, C)``, through blocks around any mechanism.

    Example:
        >>> import torch
        >>> from linattn.models.language import LinearAttentionConfig, LinearAttentionModel
        >>> config = LinearAttentionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, canon="AC")
        >>> LinearAttentionModel(config)(torch.arange(5).unsqueeze(0)).last_hidden_state.shape
        torch.Size([1, 5, 32])
    """

    def __init__(self, config: LinearAttentionConfig) -> None:
        super().__init__(config)
        options = [config.block_options(layer) for layer in range(config.num_hidden_layers)]
        self.rotary_widths = [own.rotary_width for own in options]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        places = config.max_position_embeddings
        self.embed_positions = None if places is None else nn.Embedding(places, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(CachedBlock(own) for own in options)
        self.norm = create_norm(config.norm, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Compute the hidden states after the final norm.

        Args:
            input_ids: token ids ``(B, T)``, or give ``inputs_embeds (B, T, C)`` in their place.
            attention_mask: ``(B, past + T)``, 1 = real token. Padding may be on the left or on the right.
            position_ids: ``(B, T)`` (None: the count of real tokens). If they restart within a row, as in documents
                packed for transformers, ``cu_seqlens`` is derived from them.
            past_key_values: the cache of the tokens before; it is changed in place. It knows how many of them
                were padding.
            use_cache: whether to return a cache (None: as the config says, but not in training or for packed
                sequences).
            cu_seqlens: offsets ``(N+1,)`` of sequences packed into one row.
            output_hidden_states: also return the hidden states before each block and, last, after the norm, as other
                models of transformers do.
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions=True is not possible: a linear attention never has its weights")
        x = self._embed(input_ids, inputs_embeds)
        states = None if past_key_values is None else state_layers(past_key_values, len(self.layers))
        past, padding = (states[0].length, states[0].padding) if states else (0, None)
        if states:
            check_rows(states[0], x.shape[0])
        check_call(attention_mask, position_ids, cu_seqlens, x.shape[0], x.shape[1], past)
        check_past(attention_mask, states[0] if states else None)
        key_mask = self._key_mask(attention_mask, past, x)
        if cu_seqlens is None and position_ids is not None:
            cu_seqlens = self._packed(position_ids, key_mask, x, states is not None, bool(use_cache))
        if self._wants_cache(use_cache, past_key_values, cu_seqlens) and states is None:
            past_key_values = new_cache(len(self.layers))
            states = state_layers(past_key_values, len(self.layers))
        positions = position_ids
        if positions is None:
            positions = positions_of(attention_mask, cu_seqlens, x.shape[1], past, x.device, padding)
        if self.embed_positions is not None:
            counted = attention_mask is None and cu_seqlens is None and position_ids is None and padding is None
            check_places(positions, past + x.shape[1], self.embed_positions.num_embeddings, counted=counted)
            x = x + self.embed_positions(positions)
        tokens = Tokens(key_mask, cu_seqlens, rotations(positions, self.rotary_widths, self.config.rotary_base, x))
        x = self.dropout(x)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden: tuple[Tensor, ...] | None = () if wanted else None
        for index, block in enumerate(self.layers):
            hidden = None if hidden is None else (*hidden, x)
            x = block(x, tokens, past=states[index] if states else None)
        if states:
            states[0].note_padding(key_mask)
        x = self.norm(x)
        hidden = None if hidden is None else (*hidden, x)
        return self._answer(BaseModelOutputWithPast(x, past_key_values, hidden), return_dict)

    def _embed(self, ids: Tensor | None, embeds: Tensor | None) -> Tensor:
        if (ids is None) == (embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of them")
        if embeds is not None:
            width = self.config.hidden_size
            if embeds.ndim != 3 or embeds.shape[-1] != width:
                raise ValueError(f"inputs_embeds must be (batch, tokens, {width}), got {tuple(embeds.shape)}")
            return embeds
        assert ids is not None
        if ids.ndim != 2:
            raise ValueError(f"input_ids must be (batch, tokens), got {tuple(ids.shape)}")
        found: Tensor = self.embed_tokens(ids)
        return found

    def _wants_cache(self, use_cache: bool | None, past: Cache | None, cu_seqlens: Tensor | None) -> bool:
        if past is not None and not self.config.causal:
            raise ValueError("past_key_values needs causal=True: an encoder sees the whole sequence")
        if self.training and any(block.gradient_checkpointing for block in self.layers):
            if past is not None:
                raise ValueError("past_key_values and gradient checkpointing exclude one another in training")
            return False  # blocks run twice, and would write their states twice
        if cu_seqlens is not None:
            if use_cache or past is not None:
                raise ValueError(
                    "cu_seqlens packs sequences of several lengths, and a cache has one: leave use_cache and "
                    "past_key_values out"
                )
            return False
        if use_cache is None:
            return bool(self.config.use_cache) and not self.training
        return use_cache and self.config.causal

    def _key_mask(self, mask: Tensor | None, past: int, x: Tensor) -> Tensor | None:
        """The mask ``(B, T)`` of the new tokens, True = real; None if all are known to be.

        Checked once for all layers: every form is faster without padding. Compiled or recorded code cannot check.
        """
        if mask is None:
            return None
        key_mask = mask[:, past:].bool()
        recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()
        return None if not (torch.compiler.is_compiling() or recorded) and bool(key_mask.all()) else key_mask

    def _packed(
        self, positions: Tensor, key_mask: Tensor | None, x: Tensor, has_cache: bool, use_cache: bool
    ) -> Tensor | None:
        """``cu_seqlens`` derived from ``position_ids``; with a cache these are read only where that costs nothing."""
        readable = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if x.shape[1] == 1 or (has_cache and not readable):
            return None
        refused = OF_A_CACHE if has_cache or use_cache else None
        return offsets_of_positions(positions, key_mask, x.shape[0], refused)
