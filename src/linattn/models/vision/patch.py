"""Patch embedding: from an image to tokens."""

import torch.nn.functional as F
from torch import Tensor, nn


def pair(name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    """``(n, n)`` for a number n; a pair stays as it is."""
    both = (value, value) if isinstance(value, int) else value
    if not isinstance(both, tuple) or len(both) != 2 or not all(isinstance(n, int) and n >= 1 for n in both):
        raise ValueError(f"{name} must be an integer >= 1 or a pair (height, width) of them, got {value!r}")
    return both


class PatchEmbed(nn.Module):
    """Linear map of non-overlapping patches: ``(B, channels, H, W)`` to ``(B, height width, C)`` and the plane's shape.

    If patches do not divide the image, it is padded with zeros at the bottom and on the right.
    """

    def __init__(self, patch_size: tuple[int, int], in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.patch_size, self.in_chans = patch_size, in_chans
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Number of patches down and across."""
        return -(-image_size[0] // self.patch_size[0]), -(-image_size[1] // self.patch_size[1])

    def forward(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        if image.ndim != 4 or image.shape[1] != self.in_chans:
            raise ValueError(f"images must be (B, {self.in_chans}, height, width), got shape {tuple(image.shape)}")
        height, width = image.shape[2:]
        down, across = self.patch_size
        if height % down or width % across:
            image = F.pad(image, (0, -width % across, 0, -height % down))
        plane = self.proj(image)
        return plane.flatten(2).transpose(1, 2), (plane.shape[2], plane.shape[3])
