"""BERT and the encoders that share its layers: RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA."""

from typing import Any, ClassVar

from torch import Tensor, nn

from linattn.convert.adapters.base import Adapter, Projected, Site
from linattn.convert.adapters.heads import blocks, inside, join_heads, split_heads
from linattn.convert.plan import LayerShape

LAYERS = ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer", "ElectraLayer")


class BertAdapter(Adapter):
    """``q, k, v = query(x), key(x), value(x)``; the output projection is a separate module beside the attention.

    The attention is bidirectional, or causal if ``config.is_decoder``. Cross-attention is not converted.
    """

    model_types: ClassVar[tuple[str, ...]] = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask", "past_key_values")
    lora_targets: ClassVar[tuple[str, ...]] = ("query", "key", "value")

    def sites(self, model: nn.Module) -> list[Site]:
        found = []
        for index, (name, block) in enumerate(blocks(model, *LAYERS)):
            attention: Any = getattr(block.attention, "self")  # noqa: B009, the name is a word of the language
            heads, width = attention.num_attention_heads, attention.attention_head_size
            shape = LayerShape(heads, heads, width, attention.config.hidden_size, causal=attention.is_causal)
            found.append(Site(inside(name, "attention", "self"), index, shape))
        return found

    def most_tokens(self, model: Any) -> int | None:
        """In RoBERTa and its relatives positions start after the padding id: the first of them are never used."""
        config = model.config
        begins = 0 if config.model_type in ("bert", "electra") else config.pad_token_id + 1
        return int(config.max_position_embeddings) - begins

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        parts = (module.query(hidden), module.key(hidden), module.value(hidden))
        return Projected(*(split_heads(part, module.attention_head_size) for part in parts))

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return join_heads(out), None

    def cache(self, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        return getattr(cache, "self_attention_cache", cache)


ADAPTERS = (BertAdapter(),)
