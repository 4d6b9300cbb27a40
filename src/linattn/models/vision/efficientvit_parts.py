"""EfficientViT's blocks on a plane ``(B, C, H, W)``: convolutions, and attention over several scales."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.attention_parts import KeyPosition
from linattn.layers.block_parts import DropPath
from linattn.mechanisms.registry import create_mechanism
from linattn.ops.shared.call import check_size


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


class MultiScaleAttention(nn.Module):
    """``y = norm(W_o (mechanism(q, k + E, v) + gelu(norm(v))))``, with heads of q, k, v at several scales side by side.

    x is ``(B, C, H, W)``, and so is y. ``q, k, v = W_qkv x`` have ``C / head_dim`` heads. Each further scale adds as
    many: a depthwise convolution of these, mixed within each head's q, k or v. E is a learned position of the keys; the
    norm of v has ``head_dim`` channels that all heads share. Papers: Cai et al., EfficientViT, for the scales; Xu et
    al., QT-ViT, for E and the value branch.

    Args:
        dim, head_dim: C, and the width of a head, which divides it.
        mechanism: a name of ``linattn.list_mechanisms()``.
        scales: kernel size of each further scale's convolution.
        grid: plane that E is laid out for; None: no E.
        value_branch: add ``gelu(norm(v))``.
        eps: eps of the norms.
        mechanism_options, impl: as in ``linattn.layers.Attention``.

    Example:
        >>> import torch
        >>> from linattn.models.vision.efficientvit_parts import MultiScaleAttention
        >>> MultiScaleAttention(32, 16, "relu", grid=(4, 4))(torch.randn(2, 32, 3, 5)).shape
        torch.Size([2, 32, 3, 5])
    """

    def __init__(
        self,
        dim: int,
        head_dim: int,
        mechanism: str = "quadratic",
        *,
        scales: Sequence[int] = (5,),
        grid: tuple[int, int] | None = None,
        value_branch: bool = True,
        eps: float = 1e-5,
        mechanism_options: Mapping[str, Any] | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        if dim % head_dim:
            raise ValueError(f"head_dim must divide dim, got dim = {dim} and head_dim = {head_dim}")
        if any(scale % 2 == 0 for scale in scales):
            raise ValueError(f"scales must be odd, so that each has a middle, got {tuple(scales)}")
        self.dim, self.head_dim = dim, head_dim
        heads, total = dim // head_dim, dim // head_dim * (1 + len(scales))
        self.num_heads = total
        self.qkv = nn.Conv2d(dim, 3 * dim, 1, bias=False)
        self.scales = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 * dim, 3 * dim, scale, padding=scale // 2, groups=3 * dim, bias=False),
                nn.Conv2d(3 * dim, 3 * dim, 1, groups=3 * heads, bias=False),
            )
            for scale in scales
        )
        self.key_position = None if grid is None else KeyPosition(total, head_dim, grid)
        self.mechanism = create_mechanism(
            mechanism, num_heads=total, head_dim=head_dim, input_dim=dim, impl=impl, **(mechanism_options or {})
        )
        self.value_norm = nn.BatchNorm2d(head_dim, eps=eps) if value_branch else None
        self.proj = nn.Conv2d(total * head_dim, dim, 1, bias=False)
        self.norm = nn.BatchNorm2d(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        check_size("x", "width", x.shape[1], self.dim, "the layer's dim")
        shape = (x.shape[2], x.shape[3])
        qkv = self.qkv(x)
        qkv = torch.cat([qkv, *(scale(qkv) for scale in self.scales)], dim=1)
        # The q, k and v of each head lie side by side.
        heads = qkv.flatten(2).unflatten(1, (self.num_heads, 3, self.head_dim)).transpose(3, 4)
        q, k, v = heads.unbind(2)  # (B, H, T, D)
        if self.key_position is not None:
            k = self.key_position(k, spatial_shape=shape)
        tokens = x.flatten(2).transpose(1, 2) if self.mechanism.info.uses_input else None
        out = self.mechanism(q, k, v, spatial_shape=shape, x=tokens)
        if self.value_norm is not None:
            # Heads are put into the batch: one norm serves all of them.
            normed = self.value_norm(v.flatten(0, 1).transpose(1, 2).unflatten(2, shape))
            out = out + F.gelu(normed).flatten(2).transpose(1, 2).unflatten(0, (-1, self.num_heads))
        out = out.transpose(2, 3).flatten(1, 2).unflatten(2, shape)
        return self.norm(self.proj(out))
