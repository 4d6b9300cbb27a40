"""Vision transformers by size, mechanism and preset."""

from collections.abc import Mapping
from typing import Any, Literal

from linattn.layers.presets import preset as find_preset
from linattn.models.vision.patch import PatchEmbed, pair
from linattn.models.vision.stage import StageAttention, fitting_parts
from linattn.models.vision.vit import VisionTransformer
from linattn.ops.shared.checks import check_choice

_DEIT = {"img_size": 224, "patch_size": 16, "in_chans": 3, "num_classes": 1000, "depth": 12}
_SMALL_IMAGES = {"img_size": 32, "patch_size": 4, "in_chans": 3, "num_classes": 10}

# DeiT's three, two for images of 32 pixels, and one for the 8 x 8 grey digits of scikit-learn.
SIZES: dict[str, dict[str, Any]] = {
    "base": _DEIT | {"embed_dim": 768, "num_heads": 12},
    "small": _DEIT | {"embed_dim": 384, "num_heads": 6},
    "tiny": _DEIT | {"embed_dim": 192, "num_heads": 3},
    "nano": _SMALL_IMAGES | {"embed_dim": 96, "num_heads": 3, "depth": 6},
    "pico": _SMALL_IMAGES | {"embed_dim": 64, "num_heads": 2, "depth": 4},
    "digits": {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10, "embed_dim": 48, "num_heads": 3,
               "depth": 3},
}  # fmt: skip


def create_vit(
    size: str = "tiny", mechanism: str | None = None, *, preset: str | None = None, **options: Any
) -> VisionTransformer:
    """Build a :class:`VisionTransformer` of a known size.

    Args:
        size: a key of ``SIZES``.
        mechanism: a name of ``linattn.list_mechanisms()`` (None: the preset's, or ``"softmax"``).
        preset: the parts of a paper's block (``linattn.layers.list_presets()``), around any mechanism; its rotary
            positions are left out if the mechanism has no features to turn, or if these do not form pairs.
        options: of ``VisionTransformer``; they override those of size and preset, and ``attention`` options are merged.

    Example:
        >>> import torch
        >>> from linattn.models.vision import create_vit
        >>> model = create_vit("digits", "relu", patch_size=2)
        >>> model(torch.randn(4, 1, 8, 8)).shape
        torch.Size([4, 10])
    """
    check_choice("size", size, tuple(SIZES))
    options = SIZES[size] | options
    if preset is not None:
        parts = find_preset(preset)
        mechanism = mechanism or parts.mechanism
        patches = PatchEmbed(pair("patch_size", options["patch_size"]), 1, 1)
        grid = patches.grid(pair("img_size", options["img_size"]))
        named = dict(options.get("attention") or {})
        own = StageAttention(mechanism, {"mechanism_options": named.get("mechanism_options") or {}})
        wanted = parts.attention_options(grid)
        attention = fitting_parts(wanted, own, options["embed_dim"], options["num_heads"]) | named
        options = parts.block | {"global_pool": parts.global_pool} | options | {"attention": attention}
    return VisionTransformer(mechanism or "softmax", **options)


def create_deit_lion(
    size: str = "tiny",
    mechanism: str = "lion",
    *,
    decay: Literal["fixed", "selective"] = "fixed",
    order: Literal["line", "snake"] = "snake",
    attention: Mapping[str, Any] | None = None,
    **options: Any,
) -> VisionTransformer:
    """Build DeiT as LION has it: without positions, classified by the mean of all tokens, the class token included.

    Args:
        size: a key of ``SIZES``.
        mechanism: ``"lion"``, or another mechanism in the same host, which does not get LION's options.
        decay: ``"fixed"`` (LION-D) or ``"selective"`` (LION-S).
        order: ``"snake"`` (LION-natural), two orders over the plane, or ``"line"``.
        attention: options of ``linattn.layers.Attention``; its ``mechanism_options`` override decay and order.
        options: options of ``VisionTransformer``.

    Example:
        >>> from linattn.models.vision import create_deit_lion
        >>> model = create_deit_lion("tiny", depth=1)
        >>> model.blocks[0].attn.mechanism.order, model.num_prefix_tokens
        ('snake', 1)
    """
    parts = dict(attention or {})
    if mechanism == "lion":
        own = dict(parts.get("mechanism_options") or {})
        parts["mechanism_options"] = {"decay": decay, "order": order} | own
    host: dict[str, Any] = {"global_pool": "avg", "class_token": True, "pos_embed": None, "drop_path_rate": 0.1}
    return create_vit(size, mechanism, attention=parts, **(host | options))
