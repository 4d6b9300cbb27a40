"""Operations that change the values of pixels but not their places. Results equal PIL's to the last bit.

Every function takes ``images (b, C, H, W)`` uint8 and, if it has a parameter, one number for each image, ``(b,)``, on
the host. It returns uint8 of the same shape.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.train.augment.host import per_image


def invert(images: Tensor) -> Tensor:
    return 255 - images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep only the ``bits`` highest bits of each pixel; with 0 the image is black."""
    dropped = per_image((8 - bits.long()).clamp(0, 8), images).int()
    return ((images.int() >> dropped) << dropped).to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert pixels of at least ``threshold``."""
    return torch.where(images < per_image(threshold, images), images, 255 - images)


def solarize_add(images: Tensor, added: Tensor) -> Tensor:
    """Add ``added`` to pixels below 128."""
    brighter = (images.int() + per_image(added.long(), images)).clamp_max(255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black."""
    return _blend(torch.zeros((), device=images.device), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean grey of the image."""
    pixels = images.shape[2] * images.shape[3]
    total = grey(images).sum((1, 2, 3), keepdim=True)
    return _blend((2 * total + pixels).div(2 * pixels, rounding_mode="floor").float(), images, factor)


def color(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey version of the image; grey images stay as they are."""
    return _blend(grey(images).float(), images, factor) if images.shape[1] == 3 else images


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image smoothed by ``((1, 1, 1), (1, 5, 1), (1, 1, 1)) / 13``; the rim is not smoothed."""
    if min(images.shape[2:]) < 3:
        return images
    values = images.float()
    # A box plus four times its middle: a kernel with a 5 would have to be copied to the device.
    total = F.avg_pool2d(values, 3, stride=1, divisor_override=1) + 4 * values[:, :, 1:-1, 1:-1]
    smooth = values.clone()
    # Sums are whole numbers below 2^24, exact in fp32; a 13th is never halfway between two, so this rounds to nearest.
    smooth[:, :, 1:-1, 1:-1] = (total.round() / 13 + 0.5).floor()
    return _blend(smooth, images, factor)


def grey(images: Tensor) -> Tensor:
    """The grey image ``(b, 1, H, W)`` int32: ITU-R 601 luma in 16-bit arithmetic; a single channel stays as it is."""
    values = images.int()
    if images.shape[1] == 1:
        return values
    red, green, blue = values.unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16)[:, None]


def _blend(start: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """``start + factor (images - start)``, clamped to 0..255 and rounded down."""
    mixed = start + per_image(factor, images) * (images - start)
    return mixed.clamp_(0, 255).to(torch.uint8)
