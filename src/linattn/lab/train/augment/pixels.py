"""Operations on pixel values, each with a parameter for every image. Results equal PIL's to the last bit.

Every function takes ``images (b, C, H, W)`` uint8 and, if it has a parameter, one value for each image, ``(b,)`` on the
host; it returns uint8 of the same shape. Values are drawn on the host, so that nothing waits for the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to ``device`` without waiting for the device."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def uniform(count: int, generator: torch.Generator) -> Tensor:
    """``count`` numbers in [0, 1), fp64."""
    return torch.rand(count, generator=generator, dtype=torch.float64)


def per_image(numbers: Tensor, images: Tensor) -> Tensor:
    """Host numbers ``(b,)`` as ``(b, 1, 1, 1)`` on the device of ``images``; fp64 becomes fp32."""
    numbers = numbers.float() if numbers.dtype == torch.float64 else numbers
    return to_device(numbers, images.device)[:, None, None, None]


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


def auto_contrast(images: Tensor) -> Tensor:
    """Stretch the values of each channel, so that the darkest becomes 0 and the lightest 255."""
    low, high = (bound.double() for bound in images.flatten(2).aminmax(dim=2, keepdim=True))
    # A tensor over a tensor: a number over a tensor uses the reciprocal, and its last bit is not that of PIL.
    scale = torch.full_like(high, 255) / (high - low)
    # In a channel of one value this would divide by zero: such a channel stays as it is.
    scale, offset = (torch.where(high > low, a, b) for a, b in ((scale, 1.0), (-low * scale, 0.0)))
    stretched = images.flatten(2).double() * scale + offset
    return stretched.clamp_(0, 255).to(torch.uint8).reshape(images.shape)


def equalize(images: Tensor) -> Tensor:
    """Spread values so that all ranges of values occur about equally often.

    With ``n_i`` pixels of value i, ``m`` the greatest value and ``step = floor((pixels - n_m) / 255)``, value i becomes
    ``floor((floor(step / 2) + sum_{j < i} n_j) / step)``. If ``step`` is 0, the channel stays as it is.
    """
    count, channels, height, width = images.shape
    rows, pixels = count * channels, height * width
    values = images.reshape(rows, pixels).long()
    # Flat, because sums into a flat tensor are deterministic on every device. They are whole numbers in any case.
    place = values + 256 * torch.arange(rows, device=images.device)[:, None]
    occurs = torch.zeros(rows * 256, dtype=torch.int64, device=images.device)
    occurs = occurs.scatter_add(0, place.flatten(), torch.ones_like(place).flatten()).reshape(rows, 256)
    step = (pixels - occurs.gather(1, values.amax(1, keepdim=True))).div(255, rounding_mode="floor")
    below = occurs.cumsum(1) - occurs
    spread = (step // 2 + below).div(step.clamp_min(1), rounding_mode="floor").clamp_max(255)
    table = torch.where(step > 0, spread, torch.arange(256, device=images.device))
    return table.gather(1, values).to(torch.uint8).reshape(images.shape)
