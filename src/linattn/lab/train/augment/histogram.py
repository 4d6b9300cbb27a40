"""Operations on pixel values that depend on the histogram of an image. Results equal PIL's to the last bit.

Every function takes ``images (b, C, H, W)`` uint8 and returns uint8 of the same shape; channels are independent.
"""

import torch
from torch import Tensor


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
