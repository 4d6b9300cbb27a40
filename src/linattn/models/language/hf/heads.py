"""Language models with a head: for next tokens, masked tokens, or classes."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)

from linattn.models.language.hf.config import LinearAttentionConfig
from linattn.models.language.hf.generation import StateGenerationMixin
from linattn.models.language.hf.inputs import OF_A_CLASS, named_offsets, offsets_of_positions, restarts
from linattn.models.language.hf.model import LinearAttentionModel, LinearAttentionPreTrainedModel

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class LinearAttentionForCausalLM(LinearAttentionPreTrainedModel, StateGenerationMixin):
    """Causal language model; ``generate()`` decodes with one state per layer, which does not grow with the text.

    Example:
        >>> import torch
        >>> from linattn.models.language import LinearAttentionConfig, LinearAttentionForCausalLM
        >>> config = LinearAttentionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, canon="ABCD")
        >>> model = LinearAttentionForCausalLM(config).eval()
        >>> prompt = torch.tensor([[1, 2, 3]])
        >>> model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0).shape
        torch.Size([1, 7])
    """

    _tied_weights_keys = TIED

    def __init__(self, config: LinearAttentionConfig) -> None:
        super().__init__(config)
        if not config.causal:
            raise ValueError("LinearAttentionForCausalLM needs causal=True in its config")
        self.model = LinearAttentionModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits ``(B, T, V)`` and, with ``labels (B, T)``, the mean loss of predicting each next label, in fp32.

        Labels of -100 are not counted. ``logits_to_keep``: compute logits of only the last so many tokens, or of the
        tokens at these indices; 0: of all. ``kwargs``: options of the loss, and ``cu_seqlens`` under the names that
        ``DataCollatorWithFlattening`` has for it, with what it adds to them. Other arguments: see the model's.
        """
        loss_options, cu_seqlens = self._loss_options(kwargs), named_offsets(cu_seqlens, kwargs)
        out = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, cu_seqlens,
            output_hidden_states, output_attentions, True,
        )  # fmt: skip
        if labels is not None and cu_seqlens is not None:
            places = torch.arange(labels.shape[1], device=labels.device, dtype=cu_seqlens.dtype)
            labels = labels.masked_fill(torch.isin(places, cu_seqlens[:-1]), -100)  # nothing before a first token
        elif labels is not None and position_ids is not None and past_key_values is None:
            labels = labels.masked_fill(restarts(position_ids, attention_mask), -100)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **loss_options)
        past = out.past_key_values
        result = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past, hidden_states=out.hidden_states)
        return self._answer(result, return_dict)


class LinearAttentionForMaskedLM(LinearAttentionPreTrainedModel):
    """Masked language model, with a bidirectional mechanism: needs ``causal=False`` in the config.

    Example:
        >>> import torch
        >>> from linattn.models.language import LinearAttentionConfig, LinearAttentionForMaskedLM
        >>> config = LinearAttentionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, causal=False)
        >>> LinearAttentionForMaskedLM(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 256])
    """

    _tied_weights_keys = TIED

    def __init__(self, config: LinearAttentionConfig) -> None:
        super().__init__(config)
        if config.causal:
            raise ValueError("LinearAttentionForMaskedLM needs causal=False in its config: both sides are to be seen")
        self.model = LinearAttentionModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """Logits ``(B, T, V)`` and, with ``labels (B, T)``, the loss at labels that are not -100, in fp32.

        ``kwargs``: options of the loss, and ``cu_seqlens`` under the names of ``DataCollatorWithFlattening``.
        """
        loss_options, cu_seqlens = self._loss_options(kwargs), named_offsets(cu_seqlens, kwargs)
        out = self.model(
            input_ids, attention_mask, position_ids, None, inputs_embeds, False, cu_seqlens, output_hidden_states,
            output_attentions, True,
        )  # fmt: skip
        logits = self.lm_head(out.last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **loss_options)
        return self._answer(MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states), return_dict)


class LinearAttentionForSequenceClassification(LinearAttentionPreTrainedModel):
    """Classifier of sequences into ``num_labels`` classes, from the last token or the mean of all (``config.pooling``).

    Example:
        >>> import torch
        >>> from linattn.models.language import LinearAttentionConfig, LinearAttentionForSequenceClassification
        >>> config = LinearAttentionConfig(
        ...     hidden_size=32, num_hidden_layers=2, num_attention_heads=2, causal=False, num_labels=10
        ... )
        >>> LinearAttentionForSequenceClassification(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 10])
    """

    def __init__(self, config: LinearAttentionConfig) -> None:
        super().__init__(config)
        self.pooling = config.pooling or ("last" if config.causal else "mean")
        self.model = LinearAttentionModel(config)
        self.dropout = nn.Dropout(config.dropout)
        self.score = nn.Linear(config.hidden_size, int(config.num_labels or 0), bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Logits ``(B, num_labels)`` and, with ``labels (B,)``, the loss, in fp32. Padding is not pooled."""
        loss_options = self._loss_options(kwargs)
        if input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        out = self.model(
            input_ids, attention_mask, position_ids, None, inputs_embeds, False, None, output_hidden_states,
            output_attentions, True,
        )  # fmt: skip
        if position_ids is not None:
            offsets_of_positions(position_ids, attention_mask, len(position_ids), OF_A_CLASS)
        pooled = pool(out.last_hidden_state, attention_mask, self.pooling)
        logits = self.score(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits.float(), config=self.config, **loss_options)
        result = SequenceClassifierOutputWithPast(loss=loss, logits=logits, hidden_states=out.hidden_states)
        return self._answer(result, return_dict)


def pool(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """Pool ``(B, T, C)`` to ``(B, C)``: the last real token, or the mean of real ones; ``mask (B, T)``, 1 = real."""
    if mask is None:
        return hidden[:, -1] if pooling == "last" else hidden.mean(1)
    real = mask.bool()
    if pooling == "mean":
        kept = hidden.masked_fill(~real.unsqueeze(-1), 0)
        return kept.sum(1) / real.sum(1, keepdim=True).clamp(min=1).to(hidden.dtype)
    last = (torch.arange(real.shape[1], device=real.device) * real).argmax(1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]


@cache
def register_auto_classes() -> None:
    """Let the Auto classes, as in ``AutoModelForCausalLM.from_pretrained(folder)``, find those of this library."""
    AutoConfig.register(LinearAttentionConfig.model_type, LinearAttentionConfig, exist_ok=True)
    for auto, own in (
        (AutoModel, LinearAttentionModel),
        (AutoModelForCausalLM, LinearAttentionForCausalLM),
        (AutoModelForMaskedLM, LinearAttentionForMaskedLM),
        (AutoModelForSequenceClassification, LinearAttentionForSequenceClassification),
    ):
        auto.register(LinearAttentionConfig, own, exist_ok=True)
