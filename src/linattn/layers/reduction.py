"""Spatial reduction: fewer keys and values than queries."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.norms import create_norm
from linattn.layers.plane import to_plane, wipe


class SpatialReduction(nn.Module):
    """Spatial reduction to one token for every ``ratio x ratio`` of the plane: strided convolution, then LayerNorm.

    x ``(B, T, C)`` to ``(B, T', C)``; prefix tokens are kept and normed with the others. A plane that ``ratio`` does
    not divide is filled up with zeros at its end. A reduced token of padding only is padding itself. Paper: Wang et
    al., Pyramid Vision Transformer.
    """

    def __init__(self, dim: int, ratio: int, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.ratio, self.num_prefix_tokens = ratio, num_prefix_tokens
        self.conv = nn.Conv2d(dim, dim, ratio, stride=ratio)
        self.norm = create_norm("layer", dim)

    def reduced_shape(self, spatial_shape: tuple[int, int]) -> tuple[int, int]:
        height, width = (-(-n // self.ratio) for n in spatial_shape)
        return height, width

    def forward(
        self, x: Tensor, *, spatial_shape: tuple[int, int], key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The reduced tokens and their mask."""
        prefix = self.num_prefix_tokens
        plane = self._fill(to_plane(wipe(x, key_mask), spatial_shape, prefix))
        tokens = torch.cat([x[:, :prefix], self.conv(plane).flatten(2).transpose(1, 2)], dim=1)
        if key_mask is not None:
            real = self._fill(key_mask[:, prefix:].unflatten(1, spatial_shape)[:, None].to(x.dtype))
            real = F.max_pool2d(real, self.ratio).flatten(1) > 0
            key_mask = torch.cat([key_mask[:, :prefix], real], dim=1)
        return self.norm(tokens), key_mask

    def _fill(self, plane: Tensor) -> Tensor:
        height, width = plane.shape[2:]
        return F.pad(plane, (0, -width % self.ratio, 0, -height % self.ratio))
