"""Swin as a host: that of PolaFormer, with any mechanism in every stage."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from linattn.layers.presets import preset as find_preset
from linattn.models.vision.backbone import Backbone, stage_grid
from linattn.models.vision.block import Block
from linattn.models.vision.channels import PlaneNorm
from linattn.models.vision.heads import Head
from linattn.models.vision.patch import pair
from linattn.models.vision.stage import Stage, check_stages, fitting_parts, stage_attentions, stage_rates
from linattn.models.vision.stems import PatchMerge, PatchStep
from linattn.models.vision.window import WindowBlock
from linattn.ops.shared.checks import check_choice

SWIN_SIZES: dict[str, dict[str, Any]] = {
    "t": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24), "drop_path_rate": 0.2},
    "s": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24), "drop_path_rate": 0.3},
    "b": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32), "drop_path_rate": 0.5},
}


class SwinTransformer(Backbone):
    """Swin: four stages of plain blocks, with softmax in shifted windows and other mechanisms over the whole plane.

    Patches of 4 with LayerNorm, neighbours merged between stages, LayerNorm, a mean, a classifier. A softmax stage has
    windows with relative positions, shifted in every second block, which is Swin itself (``mechanism="softmax"``).
    Other mechanisms have the parts of ``preset`` around them and see all tokens; PolaFormer's code gives its two linear
    stages windows of 56 tokens, which at its 224 pixels is the whole plane. LayerNorm has eps 1e-6, in Swin 1e-5.
    Papers: Liu et al., Swin Transformer; Meng et al., PolaFormer, for the host.

    Args:
        mechanism: a name of ``linattn.list_mechanisms()`` for the stages marked l, or one name per stage.
        stages: a letter per stage: l for ``mechanism``, s for softmax.
        preset: parts around a mechanism that is not softmax.
        embed_dim: width of the first stage; each further stage doubles it.
        depths, num_heads: of the four stages.
        window: tokens down and across the windows of softmax.
        mlp_ratio: width of the feed-forward part over that of the stage.
        img_size: image size that learned key positions are laid out for; they are interpolated for other sizes.
        in_chans, num_classes, global_pool, drop_rate, drop_path_rate: as in timm.
        attention: options of ``linattn.layers.Attention`` that override the preset's.
        mechanism_options: options of mechanisms, by their names; softmax in windows has none.
        impl: form of the algebra, in every stage whose mechanism has it.

    Example:
        >>> import torch
        >>> from linattn.models.vision import create_swin
        >>> model = create_swin("t", "relu", depths=(1, 1, 2, 1), num_classes=10)
        >>> model(torch.randn(1, 3, 64, 50)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        mechanism: str | Sequence[str] = "pola",
        *,
        stages: str = "llss",
        preset: str = "pola",
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window: int = 7,
        mlp_ratio: float = 4.0,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        attention: Mapping[str, Any] | None = None,
        mechanism_options: Mapping[str, Mapping[str, Any]] | None = None,
        impl: str = "auto",
    ) -> None:
        attentions = stage_attentions(mechanism, stages, mechanism_options=mechanism_options, impl=impl)
        check_stages(len(attentions), depths=depths, num_heads=num_heads)
        if (mechanism_options or {}).get("softmax"):
            raise ValueError("mechanism_options has 'softmax', but softmax in windows has no options of its own")
        dims = [embed_dim * 2**i for i in range(len(attentions))]
        parts, size = find_preset(preset), pair("img_size", img_size)
        built = []
        for i, (own, rates) in enumerate(zip(attentions, stage_rates(drop_path_rate, depths), strict=True)):
            options = fitting_parts(parts.attention_options(stage_grid(size, i)), own, dims[i], num_heads[i])
            options |= dict(attention or {}) | own.options
            blocks: list[nn.Module] = []
            for j, rate in enumerate(rates):
                shape: dict[str, Any] = {"mlp_ratio": mlp_ratio, "drop_path": rate}
                if own.mechanism == "softmax":
                    shift = window // 2 if j % 2 else 0
                    blocks.append(WindowBlock(dims[i], num_heads[i], window=window, shift=shift, **shape))
                else:
                    shape |= parts.block
                    blocks.append(Block(dims[i], num_heads[i], own.mechanism, attention=options, **shape))
            built.append(Stage(PatchMerge(dims[i - 1], dims[i]) if i else nn.Identity(), blocks))
        stem = PatchStep(in_chans, embed_dim, 4)
        head = Head(dims[-1], num_classes, drop_rate=drop_rate, global_pool=global_pool)
        norm = PlaneNorm(dims[-1])
        super().__init__(stem, built, head, dims=dims, in_chans=in_chans, num_classes=num_classes, norm=norm)
        self.init_small(nn.Linear)


def create_swin(size: str = "t", mechanism: str | Sequence[str] = "pola", **options: Any) -> SwinTransformer:
    """Build a :class:`SwinTransformer` of a known size, a key of ``SWIN_SIZES``.

    PolaFormer-Swin-S and -B have 50.6 M and 89.1 M parameters here, and 50 M and 88 M as published, which seems to
    leave out learned key positions (0.9 M and 1.2 M at 224 pixels).

    Example:
        >>> from linattn.models.vision import create_swin
        >>> model = create_swin("t", num_classes=10)  # PolaFormer-Swin-T
        >>> [type(stage.blocks[0].attn).__name__ for stage in model.stages]
        ['Attention', 'Attention', 'WindowAttention', 'WindowAttention']
    """
    check_choice("size", size, tuple(SWIN_SIZES))
    return SwinTransformer(mechanism, **(SWIN_SIZES[size] | options))
