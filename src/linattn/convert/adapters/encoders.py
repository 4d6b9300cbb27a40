"""Encoders of transformers: BERT and its kin, ViT."""

from typing import Any, ClassVar

from torch import Tensor, nn

from linattn.convert.adapters.base import Adapter, Projected, Site, blocks, join_heads, split_heads
from linattn.convert.plan import LayerShape

BERT_LAYERS = ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer", "ElectraLayer")


class BertAdapter(Adapter):
    """``q, k, v = query(x), key(x), value(x)``; the output projection is a separate module beside the attention.

    BERT, RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA. The attention is bidirectional, or causal if
    ``config.is_decoder``. Cross-attention is not converted.
    """

    model_types: ClassVar[tuple[str, ...]] = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask", "past_key_values")
    lora_targets: ClassVar[tuple[str, ...]] = ("query", "key", "value")

    def sites(self, model: nn.Module) -> list[Site]:
        found = []
        for index, name, attention in blocks(model, *BERT_LAYERS, inside="attention.self"):
            heads, width = attention.num_attention_heads, attention.attention_head_size
            shape = LayerShape(heads, heads, width, attention.config.hidden_size, causal=attention.is_causal)
            found.append(Site(name, index, shape))
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


class ViTAdapter(Adapter):
    """``q, k, v = q_proj(x), k_proj(x), v_proj(x)``, ``y = o_proj(o)``; bidirectional, positions in the embedding."""

    model_types: ClassVar[tuple[str, ...]] = ("vit",)
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask")
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def sites(self, model: nn.Module) -> list[Site]:
        found = []
        for index, name, attention in blocks(model, "ViTLayer", inside="attention"):
            heads, hidden = attention.num_attention_heads, attention.config.hidden_size
            found.append(Site(name, index, LayerShape(heads, heads, attention.head_dim, hidden, causal=False)))
        return found

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        parts = (module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden))
        return Projected(*(split_heads(part, module.head_dim) for part in parts))

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return module.o_proj(join_heads(out)), None


ENCODERS = (BertAdapter(), ViTAdapter())
