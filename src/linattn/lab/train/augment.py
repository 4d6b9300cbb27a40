"""Augmentation of whole batches on the training device, with separate parameters for every image.

Parameters are drawn on the host, without waiting for the device, and pixels never leave the device; but RandAugment is
timm's, which changes one picture of PIL at a time. Images are ``(b, C, H, W)`` uint8.
"""

import re
from math import log
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.support.extras import need
from linattn.support.options import OptionError
from linattn.support.seeds import seed_host

AREA = (0.02, 1 / 3)  # smallest and largest share of an image that is erased
ASPECT = 0.3  # its height over its width lies between this and the inverse
ATTEMPTS = 10  # how often a rectangle that does not fit is drawn, before it is given up
POLICY = (
    "m (magnitude, 0..mmax), n (operations an image, from 1), p (probability of each, 0..1), mstd (spread of the "
    "magnitude, above 100: uniform), mmax (greatest magnitude), inc (0 or 1: stronger with the magnitude), joined by "
    "dashes, as in m9-n2-mstd0.5-inc1"
)


def check_policy(text: str) -> None:
    """Raise an OptionError if ``text`` is no RandAugment in the notation of timm."""
    one = r"m\d+|n[1-9]\d*|p(0(\.\d+)?|1(\.0+)?)|mstd\d+(\.\d+)?|mmax\d+|inc[01]"
    right = re.fullmatch(rf"(rand-)?({one})(-({one}))*", text)
    given = dict(re.findall(r"([a-z]+)([\d.]+)", text)) if right else {}
    if not right or int(given.get("m", 10)) > int(given.get("mmax", 10)):
        raise OptionError("rand_augment", f"must be made of {POLICY}, got {text!r}")


class Augment:
    """Crop, flip, RandAugment, normalise, erase, in this order, as far as the config asks for them.

    Args:
        config: which operations to apply, and how strongly: an ``ImageTraining``.
        mean, std: ``(C,)``, of pixels in [0, 1], on the device of the images. The std of a constant channel would be a
            division by 0: it is taken as one step of 256.
    """

    def __init__(self, config: Any, mean: Tensor, std: Tensor) -> None:
        self.config = config
        # Pixels are 0..255 from here on, so mean and std must be too.
        self.mean = (mean * 255).float()[:, None, None]
        self.std = (std * 255).clamp_min(1).float()[:, None, None]
        self.fill = (mean * 255).round().float()

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment images to fp32, for training; ``generator``, on the host, is the only randomness."""
        if self.config.crop_padding:
            images = random_crop(images, self.config.crop_padding, generator)
        if self.config.flip:
            mirrored = to_device(torch.rand(len(images), generator=generator) < 0.5, images.device)
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        if self.config.rand_augment is not None:
            images = rand_augment(images, self.config.rand_augment, self.fill, generator)
        normalised = self.normalise(images)
        if self.config.erasing:
            normalised = random_erasing(normalised, self.config.erasing, generator)
        return normalised

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images, for testing: each channel has mean 0 and variance 1 over the training images."""
        return (images - self.mean) / self.std


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to ``device`` without waiting for the device."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def uniform(count: int, generator: torch.Generator) -> Tensor:
    """``count`` numbers in [0, 1), fp64."""
    return torch.rand(count, generator=generator, dtype=torch.float64)


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pad images with zeros on all sides and crop each to its size, at a random place."""
    count, _, height, width = images.shape
    top, left = to_device(torch.randint(2 * padding + 1, (2, count), generator=generator), images.device)
    # A view of the windows at all places: only the windows that are taken are copied.
    windows = F.pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count, device=images.device), :, top, left]


def random_erasing(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Erase a part of each of the normalised ``images`` with ``probability``, by noise ``N(0, 1)``.

    The area is uniform in 2 % to 33 % of the image, the logarithm of the aspect ratio uniform in ``log 0.3 .. -log
    0.3``, the place uniform, all drawn for each image separately.

    Paper: Zhong et al., Random Erasing Data Augmentation (arXiv:1708.04896), with the sizes and the noise of timm.
    """
    (count, _, height, width), device = images.shape, images.device
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
    noise_seed = int(torch.randint(2**62, (), generator=generator))  # on the host, so that nothing waits
    erased = (hit & fits.any(1)).nonzero()[:, 0]
    index = to_device(erased, device)
    top, left, down, across = to_device(torch.stack((top, left, down, across))[:, erased, None], device)
    row, column = torch.arange(height, device=device), torch.arange(width, device=device)
    rows = (row >= top) & (row < top + down)
    columns = (column >= left) & (column < left + across)
    chosen, on_device = images[index], torch.Generator(device).manual_seed(noise_seed)
    noise = torch.randn(chosen.shape, generator=on_device, device=device, dtype=images.dtype)
    inside = (rows[:, :, None] & columns[:, None, :])[:, None]
    return images.index_copy(0, index, torch.where(inside, noise, chosen))


def rand_augment(images: Tensor, policy: str, fill: Tensor, generator: torch.Generator) -> Tensor:
    """timm's RandAugment of each image, on the host; ``fill (C,)`` is the value of pixels from outside an image.

    Resampling is bilinear. It draws from the global generators of Python and numpy, which are seeded for it.

    Paper: Cubuk et al., RandAugment (arXiv:1909.13719).
    """
    need("RandAugment", "timm")
    from PIL import Image
    from timm.data.auto_augment import rand_augment_transform

    color = tuple(map(int, fill.tolist()))
    rules = {"img_mean": color if len(color) > 1 else color[0], "interpolation": Image.Resampling.BILINEAR}
    transform = mended(rand_augment_transform(timm_policy(policy), rules))
    with torch.random.fork_rng(devices=[]):
        seed_host(int(torch.randint(2**31, (), generator=generator)))
    pictures = images.permute(0, 2, 3, 1).squeeze(-1).cpu().numpy()
    changed = numpy.stack([numpy.asarray(transform(Image.fromarray(picture))) for picture in pictures])
    changed = changed.reshape(len(images), *images.shape[2:], -1).transpose(0, 3, 1, 2)
    return to_device(torch.from_numpy(changed).contiguous(), images.device)


def timm_policy(text: str) -> str:
    return f"rand-{text.removeprefix('rand-')}"


def mended(transform: Any) -> Any:
    """timm's RandAugment, whose Posterize takes the 0 bits that it asks for at magnitude 10."""
    for operation in transform.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return transform


def _posterize(picture: Any, bits: int, **_: Any) -> Any:
    """0 bits, which newer PIL refuses, give a black picture as in older PIL."""
    from timm.data.auto_augment import posterize

    return posterize(picture, bits) if bits > 0 else picture.point([0] * 256 * len(picture.getbands()))
