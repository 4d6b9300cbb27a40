"""PVT as a host: that of PolaFormer, with any mechanism in every stage."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from linattn.layers.presets import preset as find_preset
from linattn.mechanisms.registry import mechanism_info
from linattn.models.vision.backbone import Backbone, stage_grid
from linattn.models.vision.block import Block
from linattn.models.vision.heads import Head
from linattn.models.vision.patches import PatchStep, pair
from linattn.models.vision.stage import Stage, check_stages, fitting_parts, stage_attentions, stage_rates
from linattn.ops.shared.call import check_choice

PVT_SIZES: dict[str, dict[str, Any]] = {
    "t": {"depths": (2, 2, 2, 2)},
    "s": {"depths": (3, 4, 6, 3)},
    "m": {"depths": (3, 4, 18, 3)},
    "l": {"depths": (3, 8, 27, 3)},
}


class PyramidVisionTransformer(Backbone):
    """PVT: four stages of plain blocks on non-overlapping patches with learned positions; a mean, a classifier.

    Stage i has patches of 4, then 2, 2, 2, LayerNorm, positions and pre-norm blocks. There is no class token and no
    last norm, as in the code of FLatten and PolaFormer. A stage with softmax reduces keys and values by 8, 4, 2, 1, as
    PVT does. A mechanism of linear cost, or with gates from every token, is not reduced and gets the parts of
    ``preset``.
    Papers: Wang et al., Pyramid Vision Transformer; Meng et al., PolaFormer, for the host.

    Args:
        mechanism: a name of ``linattn.list_mechanisms()`` for the stages marked l, or one name per stage.
        stages: a letter per stage: l for ``mechanism``, s for softmax.
        preset: parts around a mechanism that sees all keys.
        embed_dims, depths, num_heads, mlp_ratios: of the four stages.
        reductions: factor by which keys and values are reduced down and across, in the other stages.
        img_size: image size that positions are laid out for; they are interpolated for other sizes.
        in_chans, num_classes, global_pool, drop_rate, drop_path_rate: as in timm.
        attention: options of ``linattn.layers.Attention`` that override those of preset and reduction, in every stage.
        mechanism_options: options of mechanisms, by their names.
        impl: form of the algebra, in every stage whose mechanism has it.

    Example:
        >>> import torch
        >>> from linattn.models.vision import create_pvt
        >>> model = create_pvt("t", "relu", depths=(1, 1, 1, 1), num_classes=10)
        >>> model(torch.randn(1, 3, 64, 50)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        mechanism: str | Sequence[str] = "pola",
        *,
        stages: str = "llll",
        preset: str = "pola",
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        num_heads: Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        reductions: Sequence[int] = (8, 4, 2, 1),
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
        per_stage = {"embed_dims": embed_dims, "depths": depths, "num_heads": num_heads, "mlp_ratios": mlp_ratios}
        check_stages(len(attentions), **per_stage, reductions=reductions)
        parts, size = find_preset(preset), pair("img_size", img_size)
        stem = PatchStep(in_chans, embed_dims[0], 4, stage_grid(size, 0))
        built = []
        for i, (own, rates) in enumerate(zip(attentions, stage_rates(drop_path_rate, depths), strict=True)):
            grid = stage_grid(size, i)
            info = mechanism_info(own.mechanism)
            sees_all = info.cost == "linear" or info.uses_input
            wanted = parts.attention_options(grid) if sees_all else {"spatial_reduction": reductions[i]}
            options = fitting_parts(wanted, own, embed_dims[i], num_heads[i], attention)
            shape: dict[str, Any] = {"mlp_ratio": mlp_ratios[i]} | parts.block
            kind = (embed_dims[i], num_heads[i], own.mechanism)
            blocks = [Block(*kind, attention=options, drop_path=rate, **shape) for rate in rates]
            built.append(Stage(PatchStep(embed_dims[i - 1], embed_dims[i], 2, grid) if i else nn.Identity(), blocks))
        head = Head(embed_dims[-1], num_classes, drop_rate=drop_rate, global_pool=global_pool)
        super().__init__(stem, built, head, dims=embed_dims, in_chans=in_chans, num_classes=num_classes)
        self.init_small(nn.Linear)


def create_pvt(size: str = "t", mechanism: str | Sequence[str] = "pola", **options: Any) -> PyramidVisionTransformer:
    """Build a :class:`PyramidVisionTransformer` of a known size, a key of ``PVT_SIZES``.

    PolaFormer-PVT-T has 12.9 M parameters here and 12 M as published, which seems to leave out its learned key
    positions (0.8 M at 224 pixels).

    Example:
        >>> from linattn.models.vision import create_pvt
        >>> model = create_pvt("t", num_classes=10)  # PolaFormer-PVT-T
        >>> create_pvt("t", "softmax").stages[0].blocks[0].attn.options.spatial_reduction  # PVT-T
        8
    """
    check_choice("size", size, tuple(PVT_SIZES))
    return PyramidVisionTransformer(mechanism, **(PVT_SIZES[size] | options))
