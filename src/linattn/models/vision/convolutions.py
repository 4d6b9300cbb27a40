"""EfficientViT's blocks of convolutions on a plane ``(B, C, H, W)``."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from linattn.layers.drop_path import DropPath


class Style(NamedTuple):
    """What all convolutions of a model share: their activation, and the eps of their BatchNorm."""

    act: type[nn.Module]
    eps: float


def conv_unit(
    dim: int,
    out_dim: int,
    kernel_size: int,
    style: Style,
    *,
    stride: int = 1,
    depthwise: bool = False,
    norm: bool = True,
    act: bool = True,
) -> nn.Sequential:
    """``act(norm(conv(x)))``; a convolution without a norm has a bias instead."""
    groups = dim if depthwise else 1
    padding = kernel_size // 2
    conv = nn.Conv2d(dim, out_dim, kernel_size, stride=stride, padding=padding, groups=groups, bias=not norm)
    parts: OrderedDict[str, nn.Module] = OrderedDict(conv=conv)
    if norm:
        parts["norm"] = nn.BatchNorm2d(out_dim, eps=style.eps)
    if act:
        parts["act"] = style.act()
    return nn.Sequential(parts)


class Residual(nn.Module):
    """``x + main(x)``; in training whole samples skip main at the rate ``drop_path``."""

    def __init__(self, main: nn.Module, drop_path: float = 0.0) -> None:
        super().__init__()
        self.main = main
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.main(x))


def separable(dim: int, out_dim: int, style: Style) -> nn.Sequential:
    """3 x 3 depthwise, then 1 x 1."""
    return nn.Sequential(conv_unit(dim, dim, 3, style, depthwise=True), conv_unit(dim, out_dim, 1, style, act=False))


def double(dim: int, out_dim: int, style: Style) -> nn.Sequential:
    """Two 3 x 3 convolutions."""
    return nn.Sequential(conv_unit(dim, out_dim, 3, style), conv_unit(out_dim, out_dim, 3, style, act=False))


def inverted(
    dim: int, out_dim: int, style: Style, *, expand: int, stride: int = 1, few_norms: bool = False
) -> nn.Sequential:
    """MBConv: 1 x 1 to ``expand dim``, 3 x 3 depthwise, 1 x 1; with ``few_norms`` only the last one has a norm."""
    hidden = expand * dim
    return nn.Sequential(
        conv_unit(dim, hidden, 1, style, norm=not few_norms),
        conv_unit(hidden, hidden, 3, style, stride=stride, depthwise=True, norm=not few_norms),
        conv_unit(hidden, out_dim, 1, style, act=False),
    )


def fused(dim: int, out_dim: int, style: Style, *, expand: int, stride: int = 1) -> nn.Sequential:
    """FusedMBConv: a full 3 x 3 to ``expand dim``, then 1 x 1."""
    hidden = expand * dim
    return nn.Sequential(
        conv_unit(dim, hidden, 3, style, stride=stride), conv_unit(hidden, out_dim, 1, style, act=False)
    )


def stem(in_chans: int, dim: int, depth: int, style: Style, *, heavy: bool) -> nn.Sequential:
    """A 3 x 3 convolution with stride 2 and ``depth`` residual blocks, separable or (``heavy``) double ones."""
    block = double if heavy else separable
    blocks: Sequence[nn.Module] = [Residual(block(dim, dim, style)) for _ in range(depth)]
    return nn.Sequential(conv_unit(in_chans, dim, 3, style, stride=2), *blocks)
