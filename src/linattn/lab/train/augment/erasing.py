"""Random erasing: a rectangle of an image is replaced by noise."""

from math import log

import torch
from torch import Tensor

from linattn.lab.train.augment.host import to_device, uniform

AREA = (0.02, 1 / 3)  # smallest and largest share of the image
ASPECT = 0.3  # height over width lies between this and its inverse
ATTEMPTS = 10  # how often a rectangle that does not fit is drawn, before it is given up


def random_erasing(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Erase a part of each of the normalised ``images (b, C, H, W)`` with ``probability``, by noise ``N(0, 1)``.

    The area is uniform in 2 % to 33 % of the image, the logarithm of the aspect ratio uniform in ``log 0.3 .. -log
    0.3``, the place uniform, all drawn for each image separately.

    Paper: Zhong et al., Random Erasing Data Augmentation (arXiv:1708.04896), with the sizes and the noise of timm.
    """
    height, width = images.shape[2:]
    erased, boxes = draw_boxes(len(images), height, width, probability, generator)
    noise_seed = int(torch.randint(2**62, (), generator=generator))  # on the host, so that nothing waits
    if not len(erased):
        return images
    device = images.device
    index = to_device(erased, device)
    top, left, down, across = to_device(boxes, device)[:, :, None]
    row, column = torch.arange(height, device=device), torch.arange(width, device=device)
    rows = (row >= top) & (row < top + down)
    columns = (column >= left) & (column < left + across)
    inside = (rows[:, :, None] & columns[:, None, :])[:, None]
    chosen = images[index]
    on_device = torch.Generator(device).manual_seed(noise_seed)
    noise = torch.randn(chosen.shape, generator=on_device, device=device, dtype=images.dtype)
    return images.index_copy(0, index, torch.where(inside, noise, chosen))


def draw_boxes(
    count: int, height: int, width: int, probability: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Indices ``(n,)`` of images to erase, and top, left, height and width of rectangles ``(4, n)``; on the host."""
    hit = uniform(count, generator) < probability
    area = uniform(count * ATTEMPTS, generator).reshape(count, ATTEMPTS)
    area = (AREA[0] + (AREA[1] - AREA[0]) * area) * (height * width)
    ratio = (uniform(count * ATTEMPTS, generator).reshape(count, ATTEMPTS) * 2 - 1).mul(log(ASPECT)).exp()
    down, across = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (down < height) & (across < width)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    down, across = down.gather(1, first)[:, 0], across.gather(1, first)[:, 0]
    top = (uniform(count, generator) * (height - down + 1)).floor()
    left = (uniform(count, generator) * (width - across + 1)).floor()
    erased = (hit & fits.any(1)).nonzero()[:, 0]
    return erased, torch.stack((top, left, down, across)).long()[:, erased]
