"""The language model without a head: embeddings, blocks, a norm."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput

from linattn.layers.canon import Canon
from linattn.layers.norms import create_norm
from linattn.models.language.attention import SequenceAttention
from linattn.models.language.block import Block
from linattn.models.language.hf.cache import StateLayer, new_cache, state_layers
from linattn.models.language.hf.config import LinearAttentionConfig
from linattn.models.language.rotary import rotations
from linattn.models.language.tokens import Tokens, positions_of

LOSS_OPTIONS = (
    "num_items_in_batch",
    "shift_labels",
    "ignore_index",
)  # of transformers' losses; Trainer gives the first


class CachedBlock(GradientCheckpointingLayer, Block):
    """A block that reads its state from a layer of the cache and leaves the next one there."""

    def forward(self, x: Tensor, tokens: Tokens, past: StateLayer | None = None) -> Tensor:
        if past is None:
            return Block.forward(self, x, tokens)
        out, past.state = self.with_state(x, tokens, past.state)
        past.length += x.shape[1]
        return out


class LinearAttentionPreTrainedModel(PreTrainedModel):
    """What all heads share: how weights start."""

    config_class = LinearAttentionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CachedBlock"]  # noqa: RUF012, the type that transformers gives it
    _is_stateful = True  # a state cannot go back: assisted generation says so

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Canon):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Mechanisms first, all of each at once: only they know how their parameters and buffers start."""
        for module in self.modules():
            if isinstance(module, SequenceAttention) and not getattr(module.mechanism, "_is_hf_initialized", False):
                _start_mechanism(module)
        super().initialize_weights()

    def _loss_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What a head's ``**kwargs`` are for: options of the loss. Anything else is refused, not swallowed."""
        for name, value in kwargs.items():
            if name not in LOSS_OPTIONS and value is not None:
                allowed = ", ".join([*list(inspect.signature(self.forward).parameters)[:-1], *LOSS_OPTIONS])
                raise TypeError(f"{type(self).__name__} takes no {name!r}; it takes {allowed}")
        return {name: value for name, value in kwargs.items() if name in LOSS_OPTIONS}

    def _answer(self, result: ModelOutput, return_dict: bool | None) -> Any:
        """An output by name, or as a tuple for who asked for one."""
        by_name = self.config.return_dict if return_dict is None else return_dict
        return result if by_name else result.to_tuple()


def _start_mechanism(attention: SequenceAttention) -> None:
    """Give what was not loaded from a file the values of a new mechanism, and mark all of it as done."""
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


class LinearAttentionModel(LinearAttentionPreTrainedModel):
    """Tokens ``(B, T)`` to hidden states ``(B, T, C)``, through blocks around any mechanism.

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
        """Hidden states after the last norm.

        Args:
            input_ids: ``(B, T)``, or ``inputs_embeds (B, T, C)`` in their place.
            attention_mask: ``(B, past + T)``, 1 = real token. Padding may stand on the left or on the right.
            position_ids: ``(B, T)`` (None: real tokens are counted).
            past_key_values: a cache that earlier tokens left; it is changed.
            use_cache: return a cache (None: what the config says; no in training and for packed sequences).
            cu_seqlens: ``(N+1,)`` offsets of sequences packed into one row.
            output_hidden_states: also those before the first and after each block.
        """
        if output_attentions:
            raise ValueError("output_attentions=True is not possible: a linear attention never has its weights")
        x = self._embed(input_ids, inputs_embeds)
        use_cache = self._wants_cache(use_cache, past_key_values, cu_seqlens)
        if use_cache and past_key_values is None:
            past_key_values = new_cache(len(self.layers))
        states = None if past_key_values is None else state_layers(past_key_values, len(self.layers))
        past = states[0].length if states else 0
        tokens, positions = self._tokens(x, attention_mask, position_ids, cu_seqlens, past)
        if self.embed_positions is not None:
            self._check_positions(positions, past + x.shape[1])
            x = x + self.embed_positions(positions)
        x = self.dropout(x)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden: tuple[Any, ...] | None = (x,) if wanted else None
        for index, block in enumerate(self.layers):
            x = block(x, tokens, past=states[index] if states else None)
            hidden = None if hidden is None else (*hidden, x)
        return self._answer(BaseModelOutputWithPast(self.norm(x), past_key_values, hidden), return_dict)

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
            return False  # blocks run twice, and would write their state twice
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

    def _tokens(
        self, x: Tensor, mask: Tensor | None, positions: Tensor | None, cu_seqlens: Tensor | None, past: int
    ) -> tuple[Tokens, Tensor]:
        """What blocks are told, and the positions ``(1 or B, T)``."""
        B, T, _ = x.shape
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.ndim != 2 or tuple(mask.shape) != (B, past + T):
                got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(
                    f"attention_mask must be (batch, past + tokens) = ({B}, {past + T}), 1 = real token, got {got}"
                )
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens packs sequences without padding: leave attention_mask out")
        if positions is not None and tuple(positions.shape) not in ((B, T), (1, T)):
            raise ValueError(f"position_ids must be (batch or 1, tokens) = ({B}, {T}), got {tuple(positions.shape)}")
        if positions is None:
            positions = positions_of(mask, cu_seqlens, T, past, x.device)
        key_mask = None if mask is None else mask[:, past:].bool()
        # Asked once for all layers: without padding every form is faster. A traced or recorded value cannot be asked.
        recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if key_mask is not None and not (torch.compiler.is_compiling() or recorded) and bool(key_mask.all()):
            key_mask = None
        turned = rotations(positions, self.rotary_widths, self.config.rotary_base, x)
        return Tokens(key_mask, cu_seqlens, turned), positions

    def _check_positions(self, positions: Tensor, tokens: int) -> None:
        """Each must have a vector. ``tokens``: in a row, with what came before and with padding.

        On a GPU, where a look at positions would wait for it, and in compiled code these are counted instead.
        """
        counted = positions.is_cuda or torch.compiler.is_compiling()
        last = tokens if counted else int(positions.max()) + 1
        if last > self.config.max_position_embeddings:
            raise ValueError(
                f"input_ids must not go beyond max_position_embeddings = {self.config.max_position_embeddings} tokens, "
                f"what came before included, got {last}"
            )
