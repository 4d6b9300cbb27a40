"""Decoders of transformers: Llama and its kin, Gemma 3, GPT-NeoX, GPT-2."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linattn.convert.adapters.base import Adapter, Projected, Site, join_heads, split_heads
from linattn.convert.plan import LayerShape


class LlamaAdapter(Adapter):
    """``self_attn`` with q_proj, k_proj, v_proj, o_proj and rotary positions; q_norm and k_norm where they exist.

    Mistral, SmolLM, Qwen2 (with biases), Qwen3 and Gemma 3 (with normed queries and keys). Layers that see a window
    only stay as they are.
    """

    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")
    positions_from_mask: ClassVar[bool] = True

    def sites(self, model: nn.Module) -> list[Site]:
        found = []
        attentions: list[tuple[str, Any]] = list(model.named_modules())
        for name, module in attentions:
            if name.rpartition(".")[2] == "self_attn" and hasattr(module, "o_proj"):
                why_not = self.why_not(module)
                found.append(Site(name, module.layer_idx, self.shape(module), why_not is None, why_not))
        return found

    def shape(self, module: Any) -> LayerShape:
        heads, kv_heads = (p.weight.shape[0] // module.head_dim for p in (module.q_proj, module.k_proj))
        causal = bool(getattr(module, "is_causal", True))
        return LayerShape(heads, kv_heads, module.head_dim, module.q_proj.weight.shape[1], causal)

    def why_not(self, module: Any) -> str | None:
        """Why a layer cannot be converted; None: it can."""
        if getattr(module, "attn_logit_softcapping", None) is not None:
            return "its logits are capped by a tanh, which exact attention here does not have"
        window = getattr(module, "sliding_window", None)
        if window is None and not hasattr(module, "layer_type"):  # Mistral has one setting for all layers
            window = getattr(module.config, "sliding_window", None)
        return (
            None
            if window is None
            else f"it sees a window of {window} tokens only, so its cache has a fixed size already"
        )

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        q, k, v = (split_heads(proj(hidden), module.head_dim) for proj in (module.q_proj, module.k_proj, module.v_proj))
        if hasattr(module, "q_norm"):
            q, k = module.q_norm(q), module.k_norm(k)
        cos, sin = (part.unsqueeze(1) for part in kwargs["position_embeddings"])
        if hidden.shape[1] == 1:  # for one token the number of operations decides: all heads at once
            q, k = rotated(torch.cat([q, k], 1), cos, sin).split([q.shape[1], k.shape[1]], 1)
            return Projected(q, k, v)
        return Projected(rotated(q, cos, sin), rotated(k, cos, sin), v)

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return module.o_proj(join_heads(out)), None


class GPTNeoXAdapter(Adapter):
    """``[q, k, v] = query_key_value(x)`` in every head, q and k rotated in a part of their channels; ``y = dense(o)``.

    Pythia is of this family.
    """

    model_types: ClassVar[tuple[str, ...]] = ("gpt_neox",)
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask", "layer_past", "position_embeddings")
    lora_targets: ClassVar[tuple[str, ...]] = ("query_key_value", "dense")
    blocks: ClassVar[tuple[str, ...]] = ("GPTNeoXLayer",)
    inside: ClassVar[str] = "attention"
    positions_from_mask: ClassVar[bool] = True

    def shape(self, module: Any) -> LayerShape:
        heads = module.config.num_attention_heads
        return LayerShape(heads, heads, module.head_size, module.config.hidden_size, causal=True)

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        q, k, v = split_heads(module.query_key_value(hidden), 3 * module.head_size).chunk(3, dim=-1)
        cos, sin = (part.unsqueeze(1) for part in kwargs["position_embeddings"])
        return Projected(rotated(q, cos, sin), rotated(k, cos, sin), v)

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return module.dense(join_heads(out)), None

    def cache(self, **kwargs: Any) -> Any:
        return kwargs.get("layer_past")


class GPT2Adapter(Adapter):
    """``q, k, v = split(c_attn(x))``, ``y = dropout(c_proj(o))``; ``scaling`` may shrink with the depth.

    Cross-attention to an encoder is not converted.
    """

    model_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states", "past_key_values", "attention_mask")
    lora_targets: ClassVar[tuple[str, ...]] = ("c_attn", "c_proj")
    blocks: ClassVar[tuple[str, ...]] = ("GPT2Block",)
    inside: ClassVar[str] = "attn"

    def shape(self, module: Any) -> LayerShape:
        return LayerShape(module.num_heads, module.num_heads, module.head_dim, module.embed_dim, causal=True)

    def most_tokens(self, model: Any) -> int | None:
        return int(model.config.max_position_embeddings)

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        parts = module.c_attn(hidden).split(module.split_size, dim=2)
        return Projected(*(split_heads(part, module.head_dim) for part in parts))

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return module.resid_dropout(module.c_proj(join_heads(out))), None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of x ``(B, H, T, D)`` by the angles of cos and sin ``(B, 1, T, R)``.

    Channel i is paired with channel ``i + R / 2``.
    """
    width = cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = x[..., :width] * cos + torch.cat([-second, first], dim=-1) * sin
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)


DECODERS = (LlamaAdapter(), GPTNeoXAdapter(), GPT2Adapter())
