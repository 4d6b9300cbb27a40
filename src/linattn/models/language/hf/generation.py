"""``generate`` of transformers with states in place of keys and values; what a state cannot do is refused early."""

from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from linattn.models.language.hf.cache import StateLayer
from linattn.models.language.hf.inputs import check_past

CACHES = (None, "dynamic")
NOT_FOR_MODELS = ("tokenizer", "assistant_tokenizer")  # arguments that generate passes on to models nevertheless


class StateGenerationMixin(GenerationMixin):
    """Adds ``generate`` for models whose cache consists of :class:`StateLayer`."""

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens, as ``GenerationMixin.generate`` does.

        ``past_key_values`` may hold the states of prompts, one for each row of ``input_ids``; with ``num_beams`` or
        ``num_return_sequences``, that many copies of each (``batch_repeat_interleave``). ``input_ids`` must then be the
        whole text, prompt included, or only the new tokens together with the ``attention_mask`` of the whole text.
        """
        settings = generation_config or self.generation_config
        name = kwargs.get("cache_implementation", getattr(settings, "cache_implementation", None))
        if name not in CACHES:
            raise ValueError(
                f"cache_implementation must be None or 'dynamic', got {name!r}: others move, cut or round keys and "
                "values, and here are states in their place"
            )
        pieces = kwargs.get("prefill_chunk_size", getattr(settings, "prefill_chunk_size", None))
        if pieces and kwargs.get("inputs_embeds") is not None:
            raise ValueError("prefill_chunk_size cuts input_ids alone: give these, or read inputs_embeds whole")
        cache = kwargs.get("past_key_values")
        if isinstance(cache, Cache) and cache.get_seq_length():
            ids = next(
                (x for x in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None
            )
            _check_continued(cache, ids, kwargs.get("attention_mask"))
        return super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]  # self is a model

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As ``GenerationMixin.prepare_inputs_for_generation``, but drop arguments that are not for the model.

        ``inputs_embeds`` is an explicit parameter because transformers accepts embeddings only if it finds that name.
        """
        own = {name: value for name, value in kwargs.items() if name not in NOT_FOR_MODELS}
        own["inputs_embeds"] = inputs_embeds
        whole: Any = super()  # of a model
        found: dict[str, Any] = whole.prepare_inputs_for_generation(input_ids, *args, **own)
        return found

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching: ``generate_batch`` allocates pages of keys and values, and a state has none."""
        raise ValueError(
            "continuous batching (generate_batch) shares out pages of keys and values, and a state has none: call "
            "generate with a batch that is padded on the left"
        )


def _check_continued(cache: Cache, ids: Tensor | None, mask: Tensor | None) -> None:
    """Raise unless there are tokens to read after those of the cache, and the mask hides of these what was hidden."""
    seen = cache.get_seq_length()
    layer = next((layer for layer in cache.layers if isinstance(layer, StateLayer)), None)
    given = 0 if ids is None else ids.shape[1]
    length = max(given, 0 if mask is None else mask.shape[1])
    if length <= seen:
        raise ValueError(
            f"input_ids must go on behind the {seen} tokens that past_key_values has read, got {length}: give the "
            "whole text, or the new tokens alone and the attention_mask of the whole text"
        )
    if layer is not None and layer.padding is not None and mask is None:
        raise ValueError(
            "attention_mask must be given, of the whole text with 0 at padding: past_key_values has read padding, and "
            "generate counts positions by the mask"
        )
    check_past(mask, layer, waits=True)
