"""Vision transformers of timm. They have no config of transformers and are recognised by their class."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linattn.convert.adapters.base import Adapter, Projected, Site
from linattn.convert.adapters.heads import join_heads
from linattn.convert.plan import LayerShape


class TimmViTAdapter(Adapter):
    """``q, k, v = qkv(x)`` with norms of q and k, ``y = proj(norm(o) [sigmoid(gate(x))])``; bidirectional."""

    lora_targets: ClassVar[tuple[str, ...]] = ("qkv", "proj")
    arguments: ClassVar[tuple[str, ...]] = ("x", "attn_mask", "is_causal")

    def matches(self, model: nn.Module) -> bool:
        return _is_timms(model, "VisionTransformer")

    def sites(self, model: nn.Module) -> list[Site]:
        blocks: Any = model.get_submodule("blocks")
        return [self._site(f"blocks.{index}", index, block) for index, block in enumerate(blocks)]

    def _site(self, name: str, index: int, block: nn.Module) -> Site:
        attention: Any = getattr(block, "attn", None)
        if _is_timms(attention, "Attention") or hasattr(attention, "core"):  # with a core it is already converted
            heads, width, hidden = attention.num_heads, attention.head_dim, attention.qkv.in_features
            return Site(f"{name}.attn", index, LayerShape(heads, heads, width, hidden, causal=False))
        kind = type(block if attention is None else attention).__name__
        return Site(name, index, LayerShape(0, 0, 0, 0, causal=False), False, f"{kind} is not timm's plain attention")

    def hidden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The input is also kept among the arguments by name, since the gate of the output reads it."""
        x, named = super().hidden(args, kwargs)
        return x, named | {"input": x}

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        if kwargs.get("is_causal"):
            raise ValueError("a converted vision transformer is bidirectional, and was called with is_causal=True")
        q, k, v = module.qkv(hidden).unflatten(-1, (3, module.num_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
        return Projected(module.q_norm(q), module.k_norm(k), v)

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> Tensor:
        joined = module.norm(join_heads(out))
        gate = getattr(module, "gate", None)
        if gate is not None:
            joined = joined * gate(kwargs["input"]).sigmoid()
        return module.proj_drop(module.proj(joined))

    def scale(self, module: Any) -> float:
        return float(module.scale)

    def key_mask(self, **kwargs: Any) -> Tensor | None:
        """``(B, T)``: the keys that some query sees. Each query must see all of these or, as at padding, none."""
        mask = kwargs.get("attn_mask")
        if mask is None:
            return None
        visible = mask if mask.dtype == torch.bool else mask > -1
        real = visible.any(-2, keepdim=True)
        rows_agree = bool(((visible == real).all(-1) | ~visible.any(-1)).all())
        if mask.ndim != 4 or mask.shape[1] != 1 or not rows_agree:
            raise ValueError("attn_mask can be padding only: (B, 1, 1 or T, T), the same keys hidden from all queries")
        return real[:, 0, 0]


def _is_timms(module: nn.Module | None, name: str) -> bool:
    return any(cls.__name__ == name and cls.__module__.startswith("timm.") for cls in type(module).__mro__)


ADAPTERS = (TimmViTAdapter(),)
