"""A plain vision transformer with any mechanism as its attention."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from linattn.layers.norms import EPS
from linattn.layers.plane import to_plane
from linattn.layers.presets import preset as find_preset
from linattn.models.vision.backbone import ImageModel, chosen_indices
from linattn.models.vision.block import Block
from linattn.models.vision.heads import check_pool, start_small
from linattn.models.vision.patches import POSITIONS, PatchEmbed, pair, resize_positions, sincos_positions
from linattn.models.vision.stage import StageAttention, fitting_parts, run_block
from linattn.ops.shared.call import check_choice

POOLS = ("token", "avg")


class VisionTransformer(ImageModel):
    """Vision transformer with any mechanism: images ``(B, in_chans, H, W)`` of any size to logits ``(B, num_classes)``.

    It has patches, a class token (``global_pool="token"``), positions, pre-norm blocks and a linear head. Arguments,
    methods and parameters are named as in timm's ViT, so that weights fit where the parts do. Paper: Dosovitskiy et
    al., An Image is Worth 16x16 Words; sizes and training recipes are those of DeiT.

    Args:
        mechanism: a name of ``linattn.list_mechanisms()``.
        img_size: image size that positions and key positions are laid out for, where learned; interpolated for others.
        patch_size: an integer or ``(height, width)``.
        in_chans, num_classes: channels of an image, and classes; 0 classes leave the head out.
        embed_dim, depth, num_heads, mlp_ratio: shape of the network.
        global_pool: what is classified: ``"token"``, a class token; ``"avg"``, the mean of all tokens; ``""`` returns
            all tokens and needs ``num_classes=0``.
        class_token: whether there is one; None: only for ``"token"``. With ``"avg"`` it is part of the mean (LION).
        pos_embed: ``"learned"``, ``"sincos"`` or None.
        init_values: initial value of LayerScale (None: no LayerScale).
        drop_rate, drop_path_rate: dropout before the head; rate of skipped branches, rising linearly with depth.
        cpe, mlp_conv: as in ``Block``.
        attention: further options of ``linattn.layers.Attention``.

    Example:
        >>> import torch
        >>> from linattn.models.vision import VisionTransformer
        >>> model = VisionTransformer("relu", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
        >>> model(torch.randn(1, 3, 24, 40)).shape
        torch.Size([1, 1000])
    """

    def __init__(
        self,
        mechanism: str = "softmax",
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        global_pool: Literal["token", "avg", ""] = "token",
        class_token: bool | None = None,
        pos_embed: Literal["learned", "sincos"] | None = "learned",
        init_values: float | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        cpe: Literal[0, 1, 2] = 0,
        mlp_conv: bool = False,
        attention: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_pool(global_pool, (*POOLS, ""), num_classes)
        check_choice("class_token", class_token, (True, False, None))
        if global_pool == "token" and class_token is False:
            raise ValueError("global_pool='token' reads a class token, but class_token is False")
        check_choice("pos_embed", pos_embed, (*POSITIONS, None))
        if pos_embed == "sincos" and embed_dim % 4:
            raise ValueError(f"pos_embed='sincos' needs embed_dim to be a multiple of 4, got {embed_dim}")
        self.num_classes, self.position = num_classes, pos_embed
        self.global_pool: str = global_pool
        self.own_pool = global_pool or "avg"
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.patch_embed = PatchEmbed(pair("patch_size", patch_size), in_chans, embed_dim)
        self.grid = self.patch_embed.grid(pair("img_size", img_size))
        stride = max(self.patch_embed.patch_size)
        self.feature_info = [{"num_chs": embed_dim, "reduction": stride, "module": f"blocks.{i}"} for i in range(depth)]
        self.num_prefix_tokens = prefix = int(global_pool == "token" if class_token is None else class_token)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if prefix else None
        tokens = prefix + self.grid[0] * self.grid[1]
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, embed_dim)) if pos_embed == "learned" else None
        shape: dict[str, Any] = {"attention": attention, "mlp_ratio": mlp_ratio, "init_values": init_values, "cpe": cpe,
                                 "mlp_conv": mlp_conv, "num_prefix_tokens": prefix}  # fmt: skip
        rates = [drop_path_rate * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, mechanism, drop_path=rate, **shape) for rate in rates)
        # timm's order: a mean of patches is taken before the norm, a class token is read after it.
        self.norm = nn.LayerNorm(embed_dim, eps=EPS) if prefix else nn.Identity()
        self.fc_norm = nn.Identity() if prefix else nn.LayerNorm(embed_dim, eps=EPS)
        self.head_drop = nn.Dropout(drop_rate)
        self.head: nn.Module = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give linear maps and positions DeiT's small start; a mechanism's own parameters stay as its paper says."""
        self.init_small(nn.Linear)
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)

    def forward_features(self, x: Tensor) -> Tensor:
        """Tokens after the last block, ``(B, T, C)``, the class token first."""
        x, spatial_shape = self.patch_embed(x)
        x = self._add_positions(x, spatial_shape)
        for block in self.blocks:
            x = run_block(block, x, spatial_shape, checkpointing=self.grad_checkpointing)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits or, with ``pre_logits``, the classifier's input ``(B, C)``; all tokens if ``global_pool=""``."""
        if self.global_pool:
            x = x[:, 0] if self.global_pool == "token" else x.mean(1)
        x = self.head_drop(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Outputs of blocks, as in timm: planes ``(B, C, H, W)`` of the last ``indices``, those listed, or all."""
        check_choice("output_fmt", str(getattr(output_fmt, "value", output_fmt)), ("NCHW",))
        check_choice("return_prefix_tokens", return_prefix_tokens, (False,))
        taken = chosen_indices(indices, len(self.blocks), "blocks")
        x, spatial_shape = self.patch_embed(x)
        x = self._add_positions(x, spatial_shape)
        planes = []
        for i, block in enumerate(self.blocks[: max(taken) + 1] if stop_early else self.blocks):
            x = run_block(block, x, spatial_shape, checkpointing=self.grad_checkpointing)
            if i in taken:
                planes.append(to_plane(self.norm(x) if norm else x, spatial_shape, self.num_prefix_tokens))
        return planes if intermediates_only else (self.norm(x), planes)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what the given blocks do not need; returns their indices."""
        taken = chosen_indices(indices, len(self.blocks), "blocks")
        self.blocks = self.blocks[: max(taken) + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0)
        return taken

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head; ``global_pool`` can be the model's own or ``""``, which returns all tokens.

        Other pooling would need other tokens, and is refused.
        """
        pool = self.global_pool if global_pool is None else global_pool
        check_pool(pool, (self.own_pool, ""), num_classes)
        self.num_classes, self.global_pool = num_classes, pool
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.embed_dim, num_classes).to(self.patch_embed.proj.weight)
            start_small(self.head)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that assign parameters to layers, for learning rates that decay with depth."""
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def _add_positions(self, x: Tensor, spatial_shape: tuple[int, int]) -> Tensor:
        if self.position == "sincos":
            x = x + sincos_positions(spatial_shape, self.embed_dim, x)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        if self.pos_embed is not None:
            x = x + resize_positions(self.pos_embed, self.grid, spatial_shape, self.num_prefix_tokens)
        return x


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
        given = dict(options.get("attention") or {})
        own = StageAttention(mechanism, {"mechanism_options": given.get("mechanism_options") or {}})
        wanted = parts.attention_options(grid)
        attention = fitting_parts(wanted, own, options["embed_dim"], options["num_heads"], given)
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
