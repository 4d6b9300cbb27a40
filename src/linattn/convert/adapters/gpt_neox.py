"""GPT-NeoX and Pythia: q, k and v interleaved head by head, and rotary positions on a part of the channels."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linattn.convert.adapters.base import Adapter, Projected, Site
from linattn.convert.adapters.heads import blocks, inside, join_heads, split_heads
from linattn.convert.plan import LayerShape


class GPTNeoXAdapter(Adapter):
    """``[q, k, v] = query_key_value(x)`` in every head, q and k rotated by their positions; ``y = dense(o)``."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt_neox",)
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask", "layer_past", "position_embeddings")
    lora_targets: ClassVar[tuple[str, ...]] = ("query_key_value", "dense")
    positions_from_mask: ClassVar[bool] = True

    def sites(self, model: nn.Module) -> list[Site]:
        found = []
        for index, (name, block) in enumerate(blocks(model, "GPTNeoXLayer")):
            attention: Any = block.attention
            heads, hidden = attention.config.num_attention_heads, attention.config.hidden_size
            shape = LayerShape(heads, heads, attention.head_size, hidden, causal=True)
            found.append(Site(inside(name, "attention"), index, shape))
        return found

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        q, k, v = split_heads(module.query_key_value(hidden), 3 * module.head_size).chunk(3, dim=-1)
        cos, sin = (part.unsqueeze(1) for part in kwargs["position_embeddings"])
        return Projected(turned(q, cos, sin), turned(k, cos, sin), v)

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return module.dense(join_heads(out)), None

    def cache(self, **kwargs: Any) -> Any:
        return kwargs.get("layer_past")


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of x ``(B, H, T, D)`` by the angles of cos and sin ``(B, 1, T, R)``.

    Channel i is paired with channel ``i + R / 2``.
    """
    width = cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    rotated = x[..., :width] * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, x[..., width:]], dim=-1)


ADAPTERS = (GPTNeoXAdapter(),)
