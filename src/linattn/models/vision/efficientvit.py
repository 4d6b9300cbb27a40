"""EfficientViT as a host: that of QT-ViT, with any mechanism in its attention stages."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from linattn.models.vision.backbone import Backbone, stage_grid
from linattn.models.vision.efficientvit_parts import MultiScaleAttention, Residual, Style, fused, inverted, stem
from linattn.models.vision.heads import two_widths_head
from linattn.models.vision.patches import pair
from linattn.models.vision.stage import PlaneStage, StageAttention, check_stages, stage_attentions, stage_rates
from linattn.ops.shared.call import check_choice


class TanhGelu(nn.GELU):
    """GELU by its tanh formula."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")


_STYLES = {False: Style(nn.Hardswish, 1e-5), True: Style(TanhGelu, 1e-7)}


# Options that the authors of QT-ViT, and of EfficientViT before it, give their mechanisms in this host.
_PUBLISHED: dict[str, dict[str, Any]] = {"quadratic": {"form": "normalized"}, "relu": {"eps": 1e-15}}


def _size(widths: tuple[int, ...], depths: tuple[int, ...], head_dim: int, head_widths: tuple[int, int], large: bool,
          drop_path_rate: float) -> dict[str, Any]:  # fmt: skip
    return {"widths": widths, "depths": depths, "head_dim": head_dim, "head_widths": head_widths, "large": large,
            "drop_path_rate": drop_path_rate}  # fmt: skip


# QT-ViT-1 ... 6 are EfficientViT's B1, B2, B3, L1, L2, L3.
EFFICIENTVIT_SIZES: dict[str, dict[str, Any]] = {
    "1": _size((16, 32, 64, 128, 256), (1, 2, 3, 3, 4), 16, (1536, 1600), False, 0.05),
    "2": _size((24, 48, 96, 192, 384), (1, 3, 4, 4, 6), 32, (2304, 2560), False, 0.05),
    "3": _size((32, 64, 128, 256, 512), (1, 4, 6, 6, 9), 32, (2304, 2560), False, 0.05),
    "4": _size((32, 64, 128, 256, 512), (1, 1, 1, 6, 6), 32, (3072, 3200), True, 0.1),
    "5": _size((32, 64, 128, 256, 512), (1, 2, 2, 8, 8), 32, (3072, 3200), True, 0.1),
    "6": _size((64, 128, 256, 512, 1024), (1, 2, 2, 8, 8), 32, (6144, 6400), True, 0.1),
}


class EfficientViT(Backbone):
    """EfficientViT: stages of inverted convolutions, with multi-scale attention in the last two (large: the last).

    An attention block is ``x += attention(x)``, ``x += mbconv(x)``. Without key positions and value branch, and with
    ``mechanism="relu"``, this is EfficientViT itself. Convolutions, norms and linear maps except the classifier are
    initialised as in PyTorch. Papers: Cai et al., EfficientViT; Xu et al., QT-ViT, for the attention.

    Args:
        mechanism: a name of ``linattn.list_mechanisms()``, or one name per stage that has attention.
        widths, depths: of the stem and the four stages. In small models the depth of a convolutional stage includes the
            block that steps down; otherwise that block comes before the counted ones.
        head_dim: width of a head.
        head_widths: channels of the classifier before and after the mean.
        large: the shape of EfficientViT's L models: full convolutions at first, attention in the last stage only.
        scales: kernel sizes of the further scales of q, k and v.
        key_position, value_branch: QT-ViT's additions to the attention.
        img_size: image size that key positions are laid out for; they are interpolated for other sizes.
        in_chans, num_classes, global_pool, drop_rate, drop_path_rate: as in timm.
        mechanism_options: options of mechanisms, by their names. None: those of the authors, which are the normalized
            form of ``quadratic`` (QT-ViT) and an eps of 1e-15 of ``relu`` (EfficientViT).
        impl: form of the algebra, in every stage whose mechanism has it.

    Example:
        >>> import torch
        >>> from linattn.models.vision import create_efficientvit
        >>> model = create_efficientvit("1", "relu", depths=(1, 1, 1, 1, 1), num_classes=10)
        >>> model.eval()(torch.randn(1, 3, 64, 50)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        mechanism: str | Sequence[str] = "quadratic",
        *,
        widths: Sequence[int] = (16, 32, 64, 128, 256),
        depths: Sequence[int] = (1, 2, 3, 3, 4),
        head_dim: int = 16,
        head_widths: tuple[int, int] = (1536, 1600),
        large: bool = False,
        scales: Sequence[int] = (5,),
        key_position: bool = True,
        value_branch: bool = True,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mechanism_options: Mapping[str, Mapping[str, Any]] | None = None,
        impl: str = "auto",
    ) -> None:
        pattern = "l" if large else "ll"
        if mechanism_options is None:
            names = (mechanism,) if isinstance(mechanism, str) else mechanism
            mechanism_options = {name: own for name, own in _PUBLISHED.items() if name in names}
        attentions = stage_attentions(mechanism, pattern, mechanism_options=mechanism_options, impl=impl)
        check_stages(5, widths=widths, depths=depths)
        style, size = _STYLES[large], pair("img_size", img_size)
        owns: list[StageAttention | None] = [None] * (4 - len(attentions)) + [*attentions]
        rates = stage_rates(drop_path_rate, depths[1:])
        built = []
        for i, own in enumerate(owns):
            extra = 0 if own is None and not large else 1  # the block that steps down, where depths do not count it
            blocks = [_step_down(widths[i], widths[i + 1], style, large=large, stage=i)]
            for rate in rates[i][1 - extra :]:
                if own is None:
                    blocks.append(Residual(_local(widths[i + 1], style, large=large, stage=i), rate))
                else:
                    grid = stage_grid(size, i) if key_position else None
                    attention = MultiScaleAttention(
                        widths[i + 1], head_dim, own.mechanism, scales=scales, grid=grid, value_branch=value_branch,
                        eps=style.eps, **own.options,
                    )  # fmt: skip
                    local = _local(widths[i + 1], style, large=large, stage=i)
                    blocks.append(nn.Sequential(Residual(attention, rate), Residual(local, rate)))
            built.append(PlaneStage(blocks))
        head = two_widths_head(
            widths[-1], head_widths, num_classes, act=style.act, eps=style.eps, drop_rate=drop_rate,
            global_pool=global_pool,
        )  # fmt: skip
        start = stem(in_chans, widths[0], depths[0], style, heavy=large)
        super().__init__(start, built, head, dims=widths[1:], in_chans=in_chans, num_classes=num_classes)


def _step_down(dim: int, out_dim: int, style: Style, *, large: bool, stage: int) -> nn.Module:
    if not large:
        return inverted(dim, out_dim, style, expand=4, stride=2, few_norms=stage >= 2)
    if stage < 2:
        return fused(dim, out_dim, style, expand=16, stride=2)
    return inverted(dim, out_dim, style, expand=16 if stage == 2 else 24, stride=2, few_norms=True)


def _local(dim: int, style: Style, *, large: bool, stage: int) -> nn.Module:
    if not large:
        return inverted(dim, dim, style, expand=4, few_norms=stage >= 2)
    if stage < 2:
        return fused(dim, dim, style, expand=4)
    return inverted(dim, dim, style, expand=4 if stage == 2 else 6, few_norms=True)


def create_efficientvit(size: str = "1", mechanism: str | Sequence[str] = "quadratic", **options: Any) -> EfficientViT:
    """Build an :class:`EfficientViT` of a known size, a key of ``EFFICIENTVIT_SIZES``: QT-ViT-1 ... 6.

    Example:
        >>> from linattn.models.vision import create_efficientvit
        >>> model = create_efficientvit("1", num_classes=10)  # QT-ViT-1
        >>> b1 = create_efficientvit("1", "relu", key_position=False, value_branch=False)  # EfficientViT-B1
        >>> sum(p.numel() for p in b1.parameters())
        9102024
    """
    check_choice("size", size, tuple(EFFICIENTVIT_SIZES))
    return EfficientViT(mechanism, **(EFFICIENTVIT_SIZES[size] | options))
