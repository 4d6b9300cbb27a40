"""GPT-2: one projection for q, k and v, learned positions."""

from typing import Any, ClassVar

from torch import Tensor, nn

from linattn.convert.adapters.base import Adapter, Projected, Site
from linattn.convert.adapters.heads import blocks, inside, join_heads, split_heads
from linattn.convert.plan import LayerShape


class GPT2Adapter(Adapter):
    """``q, k, v = split(c_attn(x))``, ``y = dropout(c_proj(o))``; ``scaling`` may shrink with the depth.

    Cross-attention to an encoder is not converted.
    """

    model_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "past_key_values", "attention_mask")
    lora_targets: ClassVar[tuple[str, ...]] = ("c_attn", "c_proj")

    def sites(self, model: nn.Module) -> list[Site]:
        found = []
        for index, (name, block) in enumerate(blocks(model, "GPT2Block")):
            attention: Any = block.attn
            heads = attention.num_heads
            shape = LayerShape(heads, heads, attention.head_dim, attention.embed_dim, causal=True)
            found.append(Site(inside(name, "attn"), index, shape))
        return found

    def most_tokens(self, model: Any) -> int | None:
        return int(model.config.max_position_embeddings)

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        parts = module.c_attn(hidden).split(module.split_size, dim=2)
        return Projected(*(split_heads(part, module.head_dim) for part in parts))

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return module.resid_dropout(module.c_proj(join_heads(out))), None

    def cache(self, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        return getattr(cache, "self_attention_cache", cache)  # a decoder with an encoder has two caches


ADAPTERS = (GPT2Adapter(),)
