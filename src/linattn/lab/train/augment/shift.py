"""Random crops and flips."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.train.augment.host import per_image, to_device


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pad ``images (b, C, H, W)`` with zeros on all sides and crop each to its size, at a random place.

    Example:
        >>> import torch
        >>> images = torch.arange(9).reshape(1, 1, 3, 3)
        >>> random_crop(images, 1, torch.Generator().manual_seed(1)).shape
        torch.Size([1, 1, 3, 3])
    """
    count, _, height, width = images.shape
    places = torch.randint(2 * padding + 1, (2, count), generator=generator)
    top, left = to_device(places, images.device)
    # A view of the windows at all places: only the windows that are taken are copied.
    windows = F.pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count, device=images.device), :, top, left]


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each of ``images (b, C, H, W)`` left to right with probability 1/2."""
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(per_image(mirrored, images), images.flip(-1), images)
