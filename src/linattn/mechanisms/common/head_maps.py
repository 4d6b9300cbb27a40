"""Learned linear maps that act on each head separately, and their cost."""

import torch
from torch import Tensor, nn


class HeadwiseLinear(nn.Module):
    """Linear map per head without bias: ``y_h = x_h W_h`` for ``x (B, H, T, D)``, ``weight (H, D, out_features)``."""

    def __init__(self, num_heads: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, in_features, out_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def flops(self, length: int) -> int:
        return 2 * length * self.weight.numel()

    def extra_repr(self) -> str:
        num_heads, in_features, out_features = self.weight.shape
        return f"num_heads={num_heads}, in_features={in_features}, out_features={out_features}"
