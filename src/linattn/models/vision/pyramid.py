"""The pyramid that RALA, PolaFormer++, NaLaFormer and MirrorLA share, with any mechanism in every stage."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from linattn.layers.presets import list_presets
from linattn.layers.presets import preset as find_preset
from linattn.models.vision.backbone import Backbone, stage_grid
from linattn.models.vision.block import Block
from linattn.models.vision.heads import projected_head, start_small
from linattn.models.vision.patches import ConvMerge, ConvStem, pair
from linattn.models.vision.stage import Stage, check_stages, fitting_parts, stage_attentions, stage_rates
from linattn.ops.shared.call import check_choice


class Pyramid(Backbone):
    """Pyramid of a convolutional stem, four stages of blocks and a projected head; images of any size to logits.

    A block is ``x += cpe(x)``, ``x += gamma1 attention(norm(x))`` (NaLaFormer: once more ``x += cpe(x)``),
    ``x += gamma2 mlp(norm(x))``. The attention has the parts of ``preset`` around the stage's mechanism, the mlp a 3 x
    3 convolution inside. The stem has four 3 x 3 convolutions down to stride 4; another one stands between stages. As
    published, the first two stages are linear and the last two softmax, which is ``stages="llss"``; ``"llll"`` has no
    softmax. Papers: Fan et al., Breaking the Low-Rank Dilemma of Linear Attention (RALA), for the shape;
    ``linattn.models.vision.create_pyramid`` knows the sizes.

    If a mechanism's features do not form pairs that can be turned, the preset's rotary positions are left out.

    Args:
        mechanism: a name of ``linattn.list_mechanisms()`` for the stages marked l, or one name per stage.
        stages: a letter per stage: l for ``mechanism``, s for softmax.
        preset: parts around the mechanism and in the block (``linattn.layers.list_presets()``).
        embed_dims, depths, num_heads: of the four stages.
        mlp_ratio: width of the feed-forward part over that of the stage.
        init_values: initial value of LayerScale, one number or one per stage.
        head_width: channels of the head's projection.
        linear_init: initialisation of linear maps: ``"torch"`` is PyTorch's own, ``"small"`` truncated normal with std
            0.02 and biases 0, which convolutions always have.
        img_size: image size that learned key positions are laid out for, if the preset has them.
        stem_stride: 4, as published; 2 or 1 for small images, with the same parameters: 32 x 32 pixels leave planes of
            8, 4, 2 and 1 tokens a side with 4, of 16, 8, 4 and 2 with 2.
        in_chans, num_classes, global_pool, drop_rate, drop_path_rate: as in timm.
        attention: options of ``linattn.layers.Attention`` that override the preset's.
        mechanism_options: options of mechanisms, by their names: ``{"nala": {"power": 2}}``.
        impl: form of the algebra, in every stage whose mechanism has it.

    Example:
        >>> import torch
        >>> from linattn.models.vision import Pyramid
        >>> model = Pyramid("relu", embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2),
        ...                 num_classes=10)
        >>> model(torch.randn(2, 3, 64, 50)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        mechanism: str | Sequence[str] = "rala",
        *,
        stages: str = "llss",
        preset: str = "rala",
        embed_dims: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (1, 2, 4, 8),
        mlp_ratio: float = 3.5,
        init_values: float | Sequence[float] = 1.0,
        head_width: int = 1024,
        linear_init: Literal["torch", "small"] = "small",
        img_size: int | tuple[int, int] = 224,
        stem_stride: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        attention: Mapping[str, Any] | None = None,
        mechanism_options: Mapping[str, Mapping[str, Any]] | None = None,
        impl: str = "auto",
    ) -> None:
        attentions = stage_attentions(mechanism, stages, mechanism_options=mechanism_options, impl=impl)
        scales = init_values if isinstance(init_values, Sequence) else (init_values,) * len(attentions)
        check_stages(len(attentions), embed_dims=embed_dims, depths=depths, num_heads=num_heads, init_values=scales)
        check_choice("linear_init", linear_init, ("torch", "small"))
        parts, size = find_preset(preset), pair("img_size", img_size)
        built = []
        for i, (own, rates) in enumerate(zip(attentions, stage_rates(drop_path_rate, depths), strict=True)):
            wanted = parts.attention_options(stage_grid(size, i, stem_stride))
            options = fitting_parts(wanted, own, embed_dims[i], num_heads[i], attention)
            shape: dict[str, Any] = {"mlp_ratio": mlp_ratio, "init_values": scales[i]} | parts.block
            kind = (embed_dims[i], num_heads[i], own.mechanism)
            blocks = [Block(*kind, attention=options, drop_path=rate, **shape) for rate in rates]
            built.append(Stage(ConvMerge(embed_dims[i - 1], embed_dims[i]) if i else nn.Identity(), blocks))
        head = projected_head(embed_dims[-1], head_width, num_classes, drop_rate=drop_rate, global_pool=global_pool)
        stem = ConvStem(in_chans, embed_dims[0], stem_stride)
        super().__init__(
            stem, built, head, dims=embed_dims, in_chans=in_chans, num_classes=num_classes, stride=stem_stride
        )
        self.small = (nn.Conv2d, nn.Linear) if linear_init == "small" else (nn.Conv2d,)
        self.init_small(*self.small)

    def reset_parameters(self) -> None:
        """Initialise linear maps and convolutions anew; a mechanism's own parameters stay as they are.

        With the same seed, models with different mechanisms get the same weights around them.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and ".mechanism." not in name:
                module.reset_parameters()
        self.init_small(*self.small)
        if isinstance(self.head.fc, nn.Linear):
            start_small(self.head.fc)


def _shape(
    embed_dims: tuple[int, ...],
    depths: tuple[int, ...],
    num_heads: tuple[int, ...],
    drop_path_rate: float,
    init_values: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
) -> dict[str, Any]:
    return {"embed_dims": embed_dims, "depths": depths, "num_heads": num_heads, "drop_path_rate": drop_path_rate,
            "init_values": init_values}  # fmt: skip


_XT = _shape((32, 64, 128, 384), (2, 2, 2, 2), (1, 2, 4, 12), 0.1)
_XT_PAPER = _shape((32, 64, 192, 384), (2, 2, 4, 2), (1, 2, 6, 12), 0.1)
_T = _shape((64, 128, 256, 512), (2, 2, 6, 2), (1, 2, 4, 8), 0.1)
_S = _shape((64, 128, 320, 512), (3, 5, 9, 3), (1, 2, 5, 8), 0.15)
_B = _shape((96, 192, 384, 512), (4, 6, 12, 6), (1, 2, 6, 8), 0.4, (1.0, 1.0, 1e-6, 1e-6))
_L = _shape((96, 192, 448, 640), (4, 7, 19, 8), (1, 2, 7, 10), 0.55, (1e-6, 1e-6, 1e-6, 1e-6))

# xt ... l: RALA, NaLaFormer, MirrorLA. b0 ... b5: the same shapes with PolaFormer++'s wider head.
PYRAMID_SIZES: dict[str, dict[str, Any]] = {
    "xt": _XT,
    "xt_paper": _XT_PAPER,
    "t": _T,
    "s": _S,
    "b": _B,
    "l": _L,
    "b0": _XT | {"head_width": 2048},
    "b1": _XT_PAPER | {"head_width": 2048},
    "b2": _T | {"head_width": 2048},
    "b3": _S | {"head_width": 2048},
    "b4": _B | {"head_width": 2048},
    "b5": _L | {"head_width": 2560},
}
# NaLaFormer has linear maps where the others have 1 x 1 convolutions, which start small, and two wider sizes.
_OF_PRESET: dict[str, dict[str, Any]] = {"nala": {"linear_init": "torch"}}
_OF_BOTH: dict[tuple[str, str], dict[str, Any]] = {
    ("nala", "t"): {"mlp_ratio": 4.0},
    ("nala", "b"): {"mlp_ratio": 4.0},
}


def create_pyramid(
    preset: str = "nala", size: str = "t", mechanism: str | Sequence[str] | None = None, **options: Any
) -> Pyramid:
    """Build a :class:`Pyramid` as a paper describes it.

    ``"nala"``: NaLaFormer, sizes xt, t, s, b, l; ``"pola_plus"``: PolaFormer++, b0 ... b5; ``"rala"``: RAVLT, t, s, b,
    l; ``"mirror"``: MirrorLA, whose own backbone is not public: here it has RAVLT's stages and block, without the
    rotary positions in its attention. Every preset can be built in every size.

    Some published numbers contradict each other. NaLaFormer's size XT has 6.1 M parameters by its code (``"xt"``), but
    8 M and 1.0 G by its paper; the shape of PolaFormer++'s b1 with NaLaFormer's head has 7.8 M and fits
    (``"xt_paper"``). Its size T has 15.9 M and 2.9 G by its code, but 15 M and 2.7 G by its paper, which
    ``mlp_ratio=3.5`` fits. All of these papers call their models linear, but in their code the last two stages are
    softmax. ``stages="llll"`` is linear throughout.

    Args:
        preset: parts of the block (``linattn.layers.list_presets()``).
        size: a key of ``PYRAMID_SIZES``.
        mechanism: as in :class:`Pyramid` (None: the preset's own).
        options: options of :class:`Pyramid`, which override those of preset and size.

    Example:
        >>> from linattn.models.vision import create_pyramid
        >>> model = create_pyramid("nala", "xt", num_classes=10)
        >>> [stage.blocks[0].attn.mechanism.info.name for stage in model.stages]
        ['nala', 'nala', 'softmax', 'softmax']
    """
    check_choice("preset", preset, list_presets())
    check_choice("size", size, tuple(PYRAMID_SIZES))
    if mechanism is None:
        mechanism = find_preset(preset).mechanism
    own = _OF_PRESET.get(preset, {}) | _OF_BOTH.get((preset, size), {})
    return Pyramid(mechanism, **({"preset": preset} | PYRAMID_SIZES[size] | own | options))
