"""The feed-forward part of a block."""

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.cpe import ConvolutionalPosition


class Mlp(nn.Module):
    """Feed-forward part of a block: ``W_2 y`` with ``y = gelu(W_1 x)``.

    With ``conv=True`` it is ``W_2 (y + conv(y))`` with a depthwise 3 x 3 convolution over the plane (RALA).

    Example:
        >>> import torch
        >>> from linattn.layers import Mlp
        >>> Mlp(8, 32)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, dim: int, hidden_dim: int, *, conv: bool = False, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.conv = ConvolutionalPosition(hidden_dim, num_prefix_tokens=num_prefix_tokens) if conv else None
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor, *, spatial_shape: tuple[int, int] | None = None) -> Tensor:
        x = F.gelu(self.fc1(x))
        if self.conv is not None:
            x = self.conv(x, spatial_shape=spatial_shape)
        return self.fc2(x)
