"""Shears, shifts and rotations: one resampling with a matrix for each image."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.train.augment.host import to_device


def affine(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """``out(x, y) = in(a x + b y + c, d x + e y + f)``, bilinear; ``((a, b, c), (d, e, f))`` is the matrix of an image.

    x and y are in pixels from the upper left corner of the image, with pixel centres at halves, as in PIL. Pixels from
    outside the image are ``fill``.

    Args:
        images: ``(b, C, H, W)`` uint8.
        matrices: ``(b, 2, 3)`` on the host.
        fill: ``(C,)`` on the device of the images, 0..255.

    Example:
        >>> import torch
        >>> image = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)[None, None]
        >>> to_the_left = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
        >>> affine(image, to_the_left, torch.zeros(1))[0, 0].tolist()
        [[2, 0], [4, 0]]
    """
    height, width = images.shape[2:]
    device = images.device
    matrix = to_device(matrices.float(), device)[:, :, :, None, None]  # (b, 2, 3, 1, 1)
    x = torch.arange(width, device=device) + 0.5
    y = (torch.arange(height, device=device) + 0.5)[:, None]
    from_x, from_y = (matrix[:, :, 0] * x + matrix[:, :, 1] * y + matrix[:, :, 2]).unbind(1)  # (b, H, W) each
    grid = torch.stack((from_x * (2 / width) - 1, from_y * (2 / height) - 1), -1)
    sampled = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    outside = (from_x < 0) | (from_x >= width) | (from_y < 0) | (from_y >= height)
    return torch.where(outside[:, None], fill[:, None, None], sampled).round().to(torch.uint8)


def shear_x(factor: Tensor) -> Tensor:
    """Matrices ``(b, 2, 3)``: each row moves by ``factor (b,)`` times its distance from the top."""
    return _matrices(factor, b=factor)


def shear_y(factor: Tensor) -> Tensor:
    """Matrices ``(b, 2, 3)``: each column moves by ``factor (b,)`` times its distance from the left."""
    return _matrices(factor, d=factor)


def translate_x(share: Tensor, width: int) -> Tensor:
    """Matrices ``(b, 2, 3)`` that fetch each pixel from ``share (b,)`` of the width further right."""
    return _matrices(share, c=share * width)


def translate_y(share: Tensor, height: int) -> Tensor:
    """Matrices ``(b, 2, 3)`` that fetch each pixel from ``share (b,)`` of the height further down."""
    return _matrices(share, f=share * height)


def rotate(degrees: Tensor, height: int, width: int) -> Tensor:
    """Matrices ``(b, 2, 3)`` that rotate an image counter-clockwise about its centre by ``degrees (b,)``."""
    angle = -torch.deg2rad(degrees)
    cos, sin = angle.cos(), angle.sin()
    x, y = width / 2, height / 2
    return _matrices(degrees, a=cos, b=sin, c=x - cos * x - sin * y, d=-sin, e=cos, f=y + sin * x - cos * y)


def _matrices(like: Tensor, **given: Tensor) -> Tensor:
    one, zero = torch.ones_like(like), torch.zeros_like(like)
    entries = {"a": one, "b": zero, "c": zero, "d": zero, "e": one, "f": zero} | given
    return torch.stack([entries[name] for name in "abcdef"], 1).reshape(-1, 2, 3)
