"""Vision models of timm, whose attention is known by its class, so that timm need not be imported.

``linearize`` converts plain vision transformers, layer by layer as a plan says; ``linattn.models.vision.convert`` also
takes attention with rotary positions, biases of scores, windows or reduced keys, to which its adapter adds
:meth:`TimmAttention.attend`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.convert.adapters.families import Adapter, Projected, Site, is_of, join_heads, split_heads
from linattn.convert.plan import LayerShape

TABLE = "a relative position bias"
PARTS = 4  # a shift cuts a window at most once down and once across


class TimmAttention(Adapter):
    """``timm.layers.Attention`` of ViT, DeiT, DeiT III, DINOv2 and SigLIP; bidirectional.

    ``q, k, v = qkv(x)`` or one projection for each, with norms of q and k; ``y = proj(norm(o) [sigmoid(gate(x))])``.
    """

    projections: tuple[str, ...] = ("qkv", "proj")
    arguments: tuple[str, ...] = ("x", "attn_mask", "is_causal")
    biases: ClassVar[dict[str, str]] = {}  # of scores: name -> description; only mechanisms with scores keep them
    prefixed: bool = True  # whether the tokens before the plane are in the layer's input
    rotates: bool = False  # whether the layer is given rotary positions

    def matches(self, model: nn.Module) -> bool:
        return is_of(model, "VisionTransformer", package="timm.")

    def sites(self, model: nn.Module) -> list[Site]:
        found, blocks = [], cast("nn.ModuleList", model.get_submodule("blocks"))
        for i, block in enumerate(blocks):
            attn: Any = getattr(block, "attn", block)
            if is_of(attn, "Attention", package="timm.") or hasattr(attn, "core"):  # with a core: converted
                shape = LayerShape(attn.num_heads, attn.num_heads, attn.head_dim, attn.qkv.in_features, causal=False)
                found.append(Site(f"blocks.{i}.attn", i, shape))
            else:
                why_not = f"{type(attn).__name__} is not timm's plain attention"
                found.append(Site(f"blocks.{i}", i, LayerShape(0, 0, 0, 0, causal=False), why_not))
        return found

    def hidden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The input is also kept among the arguments by name, since the gate of the output reads it."""
        x, named = super().hidden(args, kwargs)
        return x, named | {"input": x}

    def input_dim(self, module: Any) -> int:
        """Width of x."""
        first = getattr(module, "qkv", None)
        return (module.q_proj if first is None else first).weight.shape[1]

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        if getattr(module, "qkv", None) is None:
            q, k, v = module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)
        elif getattr(module, "q_bias", None) is None:
            q, k, v = module.qkv(hidden).chunk(3, dim=-1)
        else:  # BEiT and EVA, where k has no bias to learn
            bias = torch.cat([module.q_bias, module.k_bias, module.v_bias])
            q, k, v = F.linear(hidden, module.qkv.weight, bias).chunk(3, dim=-1)
        q, k, v = (split_heads(part, module.head_dim) for part in (q, k, v))
        if getattr(module, "q_norm", None) is not None:
            q, k = module.q_norm(q), module.k_norm(k)
        return q, k, v

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> Tensor:
        """Apply the layer's own norm and gate of the output, then its projection."""
        joined = join_heads(out)
        norm, gate = getattr(module, "norm", None), getattr(module, "gate", None)
        if norm is not None:
            joined = norm(joined)
        if gate is not None:
            joined = joined * gate(kwargs["input"]).sigmoid()
        return module.proj_drop(module.proj(joined))

    def scale(self, module: Any) -> float:
        return float(module.scale)

    def key_mask(self, **kwargs: Any) -> Tensor | None:
        """``(B, T)``: the keys that some query sees. Each query must see all of these or, as at padding, none."""
        if kwargs.get("is_causal"):
            raise ValueError("a converted vision transformer is bidirectional, and was called with is_causal=True")
        mask = kwargs.get("attn_mask")
        if mask is None:
            return None
        visible = mask if mask.dtype == torch.bool else mask > -1
        real = visible.any(-2, keepdim=True)
        fits = mask.ndim == 4 and mask.shape[1] == 1
        if not fits or (mask.shape[2] > 1 and not bool(((visible == real).all(-1) | ~visible.any(-1)).all())):
            raise ValueError("attn_mask can be padding only: (B, 1, 1 or T, T), the same keys hidden from all queries")
        return real[:, 0, 0]

    def attend(self, module: Any, x: Tensor, **kwargs: Any) -> Tensor:
        """Heads ``(B, H, T, D)`` from a layer that ``linattn.models.vision.convert`` made."""
        around = self.seen_keys(module, **kwargs) | {"spatial_shape": module.plane(x.shape[1])}
        return module.attend(*self.project(module, x, **kwargs), x, **around)

    def seen_keys(self, module: Any, **kwargs: Any) -> dict[str, Any]:
        """A mask of pairs as a bias, where the mechanism has scores that it can be added to, else a mask of keys."""
        mask = kwargs.get("attn_mask")
        if mask is None or kwargs.get("is_causal") or not module.has_scores:
            return {"key_mask": self.key_mask(**kwargs)}
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
        return {"bias": mask}

    def check(self, module: Any) -> None:
        """Raise if the layer cannot have the mechanism; drop what it has no use for."""


class RotaryAttention(TimmAttention):
    """``timm.layers.AttentionRope`` and EVA's attention, which get rotary positions in the call."""

    arguments: tuple[str, ...] = ("x", "rope", "attn_mask", "is_causal")
    rotates: bool = True

    def check(self, module: Any) -> None:
        if module.plan.rotary == "features" and type(module.mechanism).rotates is None:
            raise ValueError(
                f"rotary='features' turns features, and mechanism {module.plan.mechanism!r} has none to turn"
            )

    def seen_keys(self, module: Any, **kwargs: Any) -> dict[str, Any]:
        seen, rope = super().seen_keys(module, **kwargs), kwargs.get("rope")
        if rope is None:
            return seen
        return seen | {"rotate": lambda q, k: (self.rotated(module, q, rope), self.rotated(module, k, rope))}

    def rotated(self, module: Any, x: Tensor, rope: Tensor) -> Tensor:
        """Rotate ``x (B, H, T, K)`` except prefix tokens; K may be several head widths, each of which is rotated."""
        if x.shape[-1] % module.head_dim:
            raise ValueError(
                f"rotary='features' turns {module.head_dim} channels at a time, which must divide the {x.shape[-1]} "
                f"features of {module.plan.mechanism}: use rotary='inputs'"
            )
        prefix = module.num_prefix_tokens
        sin, cos = rope.to(x.dtype).chunk(2, dim=-1)
        heads = x[:, :, prefix:].unflatten(-1, (-1, module.head_dim)).movedim(-2, 0)
        if getattr(module, "rotate_half", False):
            a, b = heads.chunk(2, dim=-1)
            across = torch.cat([-b, a], dim=-1)
        else:
            a, b = heads.unflatten(-1, (-1, 2)).unbind(-1)
            across = torch.stack([-b, a], dim=-1).flatten(-2)
        turned = (heads * cos + across * sin).movedim(0, -2).flatten(-2)
        return torch.cat([x[:, :, :prefix], turned], dim=2)


class BeitAttention(TimmAttention):
    """``timm.models.beit.Attention``: scores have a bias by the relative position of two patches.

    Each layer has its table of biases, or all share one, which the model passes.
    """

    arguments: tuple[str, ...] = ("x", "shared_rel_pos_bias")
    biases: ClassVar[dict[str, str]] = {"relative_position_bias_table": TABLE, "relative_position_index": TABLE}

    def seen_keys(self, module: Any, **kwargs: Any) -> dict[str, Any]:
        bias, shared = position_bias(module), kwargs.get("shared_rel_pos_bias")
        if shared is not None and module.has_scores:
            bias = shared if bias is None else bias + shared
        return {"bias": bias}


class WindowAttention(BeitAttention):
    """``timm.models.swin_transformer.WindowAttention``: x ``(B windows, T, C)``, in the same windows.

    A mask keeps apart what a shift brings together from opposite edges. A mechanism without scores attends inside each
    part into which the mask divides a window, one part after the other. To let it see the whole plane instead, make
    windows larger by timm's ``model.set_input_size(window_size=...)``.
    """

    arguments: tuple[str, ...] = ("x", "mask")
    prefixed: bool = False

    def attend(self, module: Any, x: Tensor, **kwargs: Any) -> Tensor:
        q, k, v = self.project(module, x)
        mask, plane = kwargs.get("mask"), pair(module.window_size)
        count = 1 if mask is None else x.shape[0] // mask.shape[0]
        if module.has_scores:
            bias = position_bias(module)
            if mask is not None:
                each = mask.unsqueeze(1).repeat(count, 1, 1, 1)  # (B windows, 1, T, T)
                bias = each if bias is None else bias + each
            return module.attend(q, k, v, x, bias=bias)
        if mask is None:
            return module.attend(q, k, v, x, spatial_shape=plane)
        parts = window_parts(mask).repeat(count, 1)  # (B windows, T)
        total = torch.zeros_like(v)
        for part in range(PARTS):
            own = parts == part
            # Windows without that part see all of themselves: their result is not used, but must be finite.
            seen = own | ~own.any(-1, keepdim=True)
            out = module.attend(q, k, v, x, key_mask=seen, spatial_shape=plane)
            total = torch.where(own[:, None, :, None], out, total)
        return total


class ReducedAttention(TimmAttention):
    """``timm.models.pvt_v2.Attention``: keys and values come from fewer tokens, after a strided convolution or pooling.

    With ``reduction="drop"`` every token gives a key, which linear attention can afford (PolaFormer's hosts do so); a
    mechanism with gates for every key needs this.
    """

    arguments: tuple[str, ...] = ("x", "feat_size")

    def check(self, module: Any) -> None:
        if getattr(module, "sr", None) is None:
            return
        if module.plan.reduction == "drop":
            for name in ("sr", "norm"):
                module.drop(name, "every token gives a key")
            module.pool = module.act = None
        elif module.mechanism.info.uses_input:
            raise ValueError(
                f"reduction='keep' leaves fewer keys than tokens, but mechanism {module.plan.mechanism!r} takes a gate "
                "for every key from its token: use reduction='drop'"
            )

    def input_dim(self, module: Any) -> int:
        return module.q.weight.shape[1]

    def attend(self, module: Any, x: Tensor, **kwargs: Any) -> Tensor:
        height, width = kwargs["feat_size"]
        source = x
        if module.sr is not None:  # the tokens that keys and values are computed from
            y = x.transpose(1, 2).unflatten(2, (int(height), int(width)))
            y = module.sr(y if module.pool is None else module.pool(y))
            y = module.norm(y.flatten(2).transpose(1, 2))
            source = y if module.act is None else module.act(y)
        q, k, v = (split_heads(part, module.head_dim) for part in (module.q(x), *module.kv(source).chunk(2, -1)))
        return module.attend(q, k, v, x, spatial_shape=(int(height), int(width)))

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return module.proj_drop(module.proj(join_heads(out)))  # its norm is that of the reduced tokens


# By the full name of the class; older releases of timm defined ViT's in the model's file.
KNOWN: dict[str, TimmAttention] = {
    "timm.layers.attention.Attention": TimmAttention(),
    "timm.models.vision_transformer.Attention": TimmAttention(),
    "timm.layers.attention.AttentionRope": RotaryAttention(),
    "timm.models.eva.EvaAttention": RotaryAttention(),
    "timm.models.beit.Attention": BeitAttention(),
    "timm.models.swin_transformer.WindowAttention": WindowAttention(),
    "timm.models.pvt_v2.Attention": ReducedAttention(),
}


def class_path(module: nn.Module) -> str:
    """The full name of a module's class, as in ``KNOWN``."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def position_bias(module: Any) -> Tensor | None:
    """The bias ``(1, H, T, T)`` from the layer's table, if it still has one."""
    table, index = module.relative_position_bias_table, module.relative_position_index
    if table is None:
        return None
    return table[index.flatten()].view(*index.shape, -1).permute(2, 0, 1).unsqueeze(0)


def pair(size: Any) -> tuple[int, int]:
    down, across = (size, size) if isinstance(size, int) else size
    return int(down), int(across)


def window_parts(mask: Tensor) -> Tensor:
    """Number the parts of windows: a label per token ``(windows, T)``, from masks ``(windows, T, T)`` of 0 and less.

    Tokens of one part see the same tokens. The first of these identifies the part, and parts are numbered in order.
    """
    first = (mask == 0).int().argmax(-1)
    leads = first == torch.arange(mask.shape[-1], device=mask.device)
    return (leads.long().cumsum(-1) - 1).gather(-1, first)
