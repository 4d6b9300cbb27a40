"""A pre-norm transformer block around any mechanism."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from linattn.layers.attention import Attention
from linattn.layers.block_parts import ConvolutionalPosition, DropPath, LayerScale, Mlp
from linattn.layers.norms import EPS
from linattn.layers.plane import prefix_option
from linattn.ops.shared.call import check_choice


class Block(nn.Module):
    """``x += scale1 attn(norm1(cpe1(x)))``, then ``x += scale2 mlp(norm2(cpe2(x)))``, with ``cpe(x) = x + conv(x)``.

    x is ``(B, T, C)``, and so is the output. The residual is taken after the convolutional position.

    Args:
        dim, num_heads, mechanism, num_prefix_tokens: as in ``Attention``; ``attention`` holds its other options.
        mlp_ratio: width of the feed-forward part over ``dim``.
        drop_path: rate at which a sample skips a branch in training.
        init_values: initial value of LayerScale (None: no LayerScale).
        cpe: convolutional positions: none, before the attention, or before both parts.
        mlp_conv: add a depthwise convolution inside the feed-forward part.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mechanism: str,
        *,
        attention: Mapping[str, Any] | None = None,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        init_values: float | None = None,
        cpe: Literal[0, 1, 2] = 0,
        mlp_conv: bool = False,
        num_prefix_tokens: int = 0,
    ) -> None:
        super().__init__()
        check_choice("cpe", cpe, (0, 1, 2))
        self.cpe1 = ConvolutionalPosition(dim, num_prefix_tokens=num_prefix_tokens) if cpe >= 1 else None
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        options = dict(attention or {})
        options["mechanism_options"] = prefix_option(
            mechanism, num_prefix_tokens, options.get("mechanism_options") or {}
        )
        self.attn = Attention(dim, num_heads, mechanism, num_prefix_tokens=num_prefix_tokens, **options)
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.cpe2 = ConvolutionalPosition(dim, num_prefix_tokens=num_prefix_tokens) if cpe >= 2 else None
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), conv=mlp_conv, num_prefix_tokens=num_prefix_tokens)
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, spatial_shape: tuple[int, int]) -> Tensor:
        if self.cpe1 is not None:
            x = self.cpe1(x, spatial_shape=spatial_shape)
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), spatial_shape=spatial_shape)))
        if self.cpe2 is not None:
            x = self.cpe2(x, spatial_shape=spatial_shape)
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x), spatial_shape=spatial_shape)))
