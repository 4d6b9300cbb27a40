"""Conditional position encoding: positions from a convolution over neighbouring tokens."""

from torch import Tensor, nn

from linattn.layers.plane import check_plane, from_plane, to_plane, wipe


class ConvolutionalPosition(nn.Module):
    """Conditional position encoding: ``x + conv(x)`` with a depthwise convolution over the plane.

    x ``(B, T, C)`` to ``(B, T, C)``; prefix tokens pass unchanged. It stands before the norm of a block. Paper: Chu et
    al., Conditional Positional Encodings (CPVT), as used by NaLaFormer and RALA.

    Example:
        >>> import torch
        >>> from linattn.layers import ConvolutionalPosition
        >>> ConvolutionalPosition(8)(torch.randn(2, 12, 8), spatial_shape=(3, 4)).shape
        torch.Size([2, 12, 8])
    """

    def __init__(self, dim: int, kernel_size: int = 3, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.conv = nn.Conv2d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)

    def forward(self, x: Tensor, *, spatial_shape: tuple[int, int] | None, key_mask: Tensor | None = None) -> Tensor:
        check_plane(x.shape[1], spatial_shape, self.num_prefix_tokens, "a convolutional position")
        assert spatial_shape is not None
        plane = to_plane(wipe(x, key_mask), spatial_shape, self.num_prefix_tokens)
        return x + from_plane(self.conv(plane), self.num_prefix_tokens)
