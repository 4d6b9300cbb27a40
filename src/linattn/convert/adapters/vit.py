"""ViT of transformers."""

from typing import Any, ClassVar

from torch import Tensor, nn

from linattn.convert.adapters.base import Adapter, Projected, Site
from linattn.convert.adapters.heads import blocks, inside, join_heads, split_heads
from linattn.convert.plan import LayerShape


class ViTAdapter(Adapter):
    """``q, k, v = q_proj(x), k_proj(x), v_proj(x)``, ``y = o_proj(o)``; bidirectional, positions in the embedding."""

    model_types: ClassVar[tuple[str, ...]] = ("vit",)
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask")
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def sites(self, model: nn.Module) -> list[Site]:
        found = []
        for index, (name, block) in enumerate(blocks(model, "ViTLayer")):
            attention: Any = block.attention
            heads, hidden = attention.num_attention_heads, attention.config.hidden_size
            shape = LayerShape(heads, heads, attention.head_dim, hidden, causal=False)
            found.append(Site(inside(name, "attention"), index, shape))
        return found

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        parts = (module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden))
        return Projected(*(split_heads(part, module.head_dim) for part in parts))

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return module.o_proj(join_heads(out)), None


ADAPTERS = (ViTAdapter(),)
