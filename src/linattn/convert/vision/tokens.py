"""Layers that only see tokens: ViT, DeiT, DeiT III, DINOv2, SigLIP; with rotary positions EVA, DINOv3 and others."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.convert.vision.attend import holds_bias
from linattn.convert.vision.base import ConvertedAttention, key_mask_of


class TokenAttention(ConvertedAttention):
    """Converted form of ``timm.layers.Attention``, with one projection for q, k and v, or one for each.

    In BEiT and EVA k has no bias.
    """

    @property
    def input_dim(self) -> int:
        first = self.qkv if getattr(self, "qkv", None) is not None else self.q_proj
        return first.weight.shape[1]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, with the layer's norms of q and k."""
        if getattr(self, "qkv", None) is not None:
            q, k, v = self._qkv(x).chunk(3, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = self.heads(q, self.num_heads), self.heads(k, self.num_kv_heads), self.heads(v, self.num_kv_heads)
        if getattr(self, "q_norm", None) is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _qkv(self, x: Tensor) -> Tensor:
        if getattr(self, "q_bias", None) is None:
            return self.qkv(x)
        bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        return F.linear(x, self.qkv.weight, bias)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.project(x)
        return self.finish(self.attend(q, k, v, x, **self._masks(attn_mask, is_causal), **self._where(x)), x)

    def _where(self, x: Tensor) -> dict[str, Any]:
        return {"spatial_shape": self.plane(x.shape[1])}

    def _masks(self, attn_mask: Tensor | None, is_causal: bool) -> dict[str, Any]:
        if attn_mask is None or is_causal or not holds_bias(self.mechanism):
            return {"key_mask": key_mask_of(attn_mask, is_causal, self.plan.mechanism)}
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=torch.float32).masked_fill(~attn_mask, -torch.inf)
        return {"bias": attn_mask}


class RotaryAttention(TokenAttention):
    """Converted form of ``timm.layers.AttentionRope`` and EVA's attention, which get rotary positions in the call."""

    def __init__(self, old: Any, plan: Any) -> None:
        super().__init__(old, plan)
        self.rotate_half = bool(getattr(old, "rotate_half", False))
        kind = type(self.mechanism)
        if plan.rotary == "features" and kind.rotates is None:
            raise ValueError(f"rotary='features' turns features, and mechanism {plan.mechanism!r} has none to turn")

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        q, k, v = self.project(x)
        masks = self._masks(attn_mask, is_causal)

        def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            assert rope is not None
            return self._turn(q, rope), self._turn(k, rope)

        out = self.attend(q, k, v, x, rotate=None if rope is None else rotate, **masks, **self._where(x))
        return self.finish(out, x)

    def _turn(self, x: Tensor, rope: Tensor) -> Tensor:
        """Rotate ``x (B, H, T, K)`` except prefix tokens; K may be several head widths, each of which is rotated."""
        if x.shape[-1] % self.head_dim:
            raise ValueError(
                f"rotary='features' turns {self.head_dim} channels at a time, which must divide the {x.shape[-1]} "
                f"features of {self.plan.mechanism}: use rotary='inputs'"
            )
        prefix = self.num_prefix_tokens
        sin, cos = rope.to(x.dtype).chunk(2, dim=-1)
        blocks = x[:, :, prefix:].unflatten(-1, (-1, self.head_dim)).movedim(-2, 0)
        if self.rotate_half:
            a, b = blocks.chunk(2, dim=-1)
            across = torch.cat([-b, a], dim=-1)
        else:
            a, b = blocks.unflatten(-1, (-1, 2)).unbind(-1)
            across = torch.stack([-b, a], dim=-1).flatten(-2)
        turned = (blocks * cos + across * sin).movedim(0, -2).flatten(-2)
        return torch.cat([x[:, :, :prefix], turned], dim=2)
