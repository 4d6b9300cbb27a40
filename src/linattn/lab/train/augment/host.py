"""Numbers that are drawn on the host and used on the device."""

import torch
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
