"""Numbers drawn on the host, used on the device."""

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on ``device``, without waiting for what the device is doing."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def uniform(count: int, generator: torch.Generator) -> Tensor:
    """``count`` numbers in [0, 1), fp64."""
    return torch.rand(count, generator=generator, dtype=torch.float64)


def per_image(numbers: Tensor, images: Tensor) -> Tensor:
    """``(b,)`` host numbers as ``(b, 1, 1, 1)`` beside ``images``, in fp32 where they were fp64."""
    numbers = numbers.float() if numbers.dtype == torch.float64 else numbers
    return to_device(numbers, images.device)[:, None, None, None]
