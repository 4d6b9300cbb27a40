"""Augmentation of whole batches on the training device, with separate parameters for every image.

Other libraries augment one picture at a time on the CPU, which cannot feed a fast device. This one draws parameters on
the host, so that images can be grouped by operation without waiting for the device, and pixels never leave the device.
Results are those of timm's transforms, with which the tests compare.
"""

from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.train.augment.pixels import per_image, to_device, uniform
from linattn.lab.train.augment.rand_augment import Policy, RandAugment
from linattn.lab.train.config import ImageTraining

AREA = (0.02, 1 / 3)  # smallest and largest share of the image
ASPECT = 0.3  # height over width lies between this and its inverse
ATTEMPTS = 10  # how often a rectangle that does not fit is drawn, before it is given up


class Augment:
    """Crop, flip, RandAugment, normalise, erase, in this order, as far as the config asks for them.

    Args:
        config: which operations to apply, and how strongly.
        mean, std: ``(C,)``, of pixels in [0, 1], on the device of the images. The std of a constant channel would be a
            division by 0: it is taken as one step of 256.
    """

    def __init__(self, config: ImageTraining, mean: Tensor, std: Tensor) -> None:
        self.config = config
        # Pixels are 0..255 from here on, so mean and std must be too.
        self.mean = (mean * 255).float()[:, None, None]
        self.std = (std * 255).clamp_min(1).float()[:, None, None]
        fill = (mean * 255).round().float()
        policy = config.rand_augment
        self.rand_augment = None if policy is None else RandAugment(Policy.parse(policy), fill)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment ``(b, C, H, W)`` uint8 to fp32, for training; ``generator``, on the host, is the only randomness."""
        if self.config.crop_padding:
            images = random_crop(images, self.config.crop_padding, generator)
        if self.config.flip:
            images = random_flip(images, generator)
        if self.rand_augment is not None:
            images = self.rand_augment(images, generator)
        normalised = self.normalise(images)
        if self.config.erasing:
            normalised = random_erasing(normalised, self.config.erasing, generator)
        return normalised

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images, for testing: each channel has mean 0 and variance 1 over the training images."""
        return (images - self.mean) / self.std


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pad ``images (b, C, H, W)`` with zeros on all sides and crop each to its size, at a random place.

    Example:
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
