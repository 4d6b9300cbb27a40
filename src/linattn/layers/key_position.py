"""A learned position embedding of the keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeyPosition(nn.Module):
    """Learned position embedding ``k + E`` for k ``(B, H, T, D)``; E is learned on a grid and starts at 0.

    E is resized to planes of another shape. Prefix tokens have no embedding. FLatten, PolaFormer and QT-ViT use it.
    """

    def __init__(self, num_heads: int, head_dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, num_heads * head_dim, *grid))

    def forward(self, k: Tensor, *, spatial_shape: tuple[int, int], num_prefix_tokens: int = 0) -> Tensor:
        grid: Tensor = self.weight
        if tuple(grid.shape[2:]) != spatial_shape:
            grid = F.interpolate(grid, size=spatial_shape, mode="bicubic")
        embedding = grid.flatten(2).transpose(1, 2).unflatten(2, (k.shape[1], k.shape[3])).transpose(1, 2)
        return k + F.pad(embedding, (0, 0, num_prefix_tokens, 0)).to(k.dtype)

    def extra_repr(self) -> str:
        return f"grid={tuple(self.weight.shape[2:])}"
