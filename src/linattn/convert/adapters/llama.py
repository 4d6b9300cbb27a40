"""Llama and models with its layers: Mistral, SmolLM, Qwen2 (with biases), Qwen3 (with normed queries and keys)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linattn.convert.adapters.base import Adapter, Projected, Site
from linattn.convert.plan import LayerShape


class LlamaAdapter(Adapter):
    """``self_attn`` with q_proj, k_proj, v_proj, o_proj and rotary positions; q_norm and k_norm where they exist."""

    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3")
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")
    positions_from_mask: ClassVar[bool] = True

    def sites(self, model: nn.Module) -> list[Site]:
        found = [
            (name, module)
            for name, module in model.named_modules()
            if name.rpartition(".")[2] == "self_attn" and hasattr(module, "o_proj")
        ]
        return [self._site(name, module) for name, module in found]

    def _site(self, name: str, module: Any) -> Site:
        heads, kv_heads = (p.weight.shape[0] // module.head_dim for p in (module.q_proj, module.k_proj))
        causal = bool(getattr(module, "is_causal", True))
        shape = LayerShape(heads, kv_heads, module.head_dim, module.q_proj.weight.shape[1], causal)
        why_not = self.why_not(module)
        return Site(name, module.layer_idx, shape, why_not is None, why_not)

    def why_not(self, module: Any) -> str | None:
        """Why a layer cannot be converted; None: it can."""
        window = self.window(module)
        if window is None:
            return None
        return f"it sees a window of {window} tokens only, so its cache has a fixed size already"

    def window(self, module: Any) -> int | None:
        """The length of the layer's sliding window; None: it sees all tokens."""
        own = getattr(module, "sliding_window", None)
        if own is None and not hasattr(module, "layer_type"):  # Mistral has one setting for all layers
            own = getattr(module.config, "sliding_window", None)
        return own

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        q, k, v = (
            proj(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
            for proj in (module.q_proj, module.k_proj, module.v_proj)
        )
        if hasattr(module, "q_norm"):
            q, k = module.q_norm(q), module.k_norm(k)
        cos, sin = (part.unsqueeze(1) for part in kwargs["position_embeddings"])
        if hidden.shape[1] == 1:  # for one token the number of operations decides: all heads at once
            both = torch.cat([q, k], 1)
            q, k = (both * cos + _turned(both) * sin).split([q.shape[1], k.shape[1]], 1)
            return Projected(q, k, v)
        return Projected(q * cos + _turned(q) * sin, k * cos + _turned(k) * sin, v)

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return module.o_proj(out.transpose(1, 2).flatten(2)), None


def _turned(x: Tensor) -> Tensor:
    """Map each pair ``(a, b)`` of channels half a head apart to ``(-b, a)``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


ADAPTERS = (LlamaAdapter(),)
