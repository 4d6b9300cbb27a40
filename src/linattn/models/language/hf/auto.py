"""Registers the models with the Auto classes of transformers."""

from functools import cache

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from linattn.models.language.hf.config import LinearAttentionConfig
from linattn.models.language.hf.heads import (
    LinearAttentionForCausalLM,
    LinearAttentionForMaskedLM,
    LinearAttentionForSequenceClassification,
)
from linattn.models.language.hf.model import LinearAttentionModel


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
