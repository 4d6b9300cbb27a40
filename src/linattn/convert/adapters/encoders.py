"""Encoders of transformers: BERT and its kin, ViT."""

from typing import Any, ClassVar

from torch import Tensor

from linattn.convert.adapters.base import Adapter, Projected, join_heads, split_heads
from linattn.convert.plan import LayerShape


class BertAdapter(Adapter):
    """``q, k, v = query(x), key(x), value(x)``; the output projection is a separate module beside the attention.

    BERT, RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA. The attention is bidirectional, or causal if
    ``config.is_decoder``. Cross-attention is not converted.
    """

    model_types: ClassVar[tuple[str, ...]] = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask", "past_key_values")
    lora_targets: ClassVar[tuple[str, ...]] = ("query", "key", "value")
    blocks: ClassVar[tuple[str, ...]] = (
        "BertLayer",
        "RobertaLayer",
        "XLMRobertaLayer",
        "CamembertLayer",
        "ElectraLayer",
    )
    inside: ClassVar[str] = "attention.self"

    def shape(self, module: Any) -> LayerShape:
        heads, width = module.num_attention_heads, module.attention_head_size
        return LayerShape(heads, heads, width, module.config.hidden_size, causal=module.is_causal)

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
    blocks: ClassVar[tuple[str, ...]] = ("ViTLayer",)
    inside: ClassVar[str] = "attention"

    def shape(self, module: Any) -> LayerShape:
        heads = module.num_attention_heads
        return LayerShape(heads, heads, module.head_dim, module.config.hidden_size, causal=False)

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        parts = (module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden))
        return Projected(*(split_heads(part, module.head_dim) for part in parts))

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return module.o_proj(join_heads(out)), None


ENCODERS = (BertAdapter(), ViTAdapter())
