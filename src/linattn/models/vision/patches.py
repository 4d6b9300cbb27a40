"""From images to planes and tokens: patches, their positions, stems, and the steps down between stages."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.norms import EPS
from linattn.ops.shared.call import check_choice, compute_dtype

POSITIONS = ("learned", "sincos")
# Strides of the first and last convolution, by the stride of the whole stem. The first step down is the first to be
# left out: all convolutions then see every pixel.
STEM_STRIDES = {4: (2, 2), 2: (1, 2), 1: (1, 1)}


def pair(name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    """``(n, n)`` for a number n; a pair stays as it is."""
    both = (value, value) if isinstance(value, int) else value
    if not isinstance(both, tuple) or len(both) != 2 or not all(isinstance(n, int) and n >= 1 for n in both):
        raise ValueError(f"{name} must be an integer >= 1 or a pair (height, width) of them, got {value!r}")
    return both


class PatchEmbed(nn.Module):
    """Linear map of non-overlapping patches: ``(B, channels, H, W)`` to ``(B, height width, C)`` and the plane's shape.

    If patches do not divide the image, it is padded with zeros at the bottom and on the right.
    """

    def __init__(self, patch_size: tuple[int, int], in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.patch_size, self.in_chans = patch_size, in_chans
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Number of patches down and across."""
        return -(-image_size[0] // self.patch_size[0]), -(-image_size[1] // self.patch_size[1])

    def forward(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        if image.ndim != 4 or image.shape[1] != self.in_chans:
            raise ValueError(f"images must be (B, {self.in_chans}, height, width), got shape {tuple(image.shape)}")
        height, width = image.shape[2:]
        down, across = self.patch_size
        if height % down or width % across:
            image = F.pad(image, (0, -width % across, 0, -height % down))
        plane = self.proj(image)
        return plane.flatten(2).transpose(1, 2), (plane.shape[2], plane.shape[3])


def resize_positions(
    positions: Tensor, grid: tuple[int, int], spatial_shape: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Resize learned positions ``(1, prefix + grid, C)`` to another plane; those of prefix tokens stay."""
    if grid == spatial_shape:
        return positions
    prefix, plane = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    plane = plane.transpose(1, 2).unflatten(2, grid)
    plane = F.interpolate(plane, size=spatial_shape, mode="bicubic", antialias=True)
    return torch.cat([prefix, plane.flatten(2).transpose(1, 2)], dim=1)


def sincos_positions(spatial_shape: tuple[int, int], dim: int, like: Tensor) -> Tensor:
    """``(1, height width, C)``: a quarter of the channels each for sin and cos of the column, sin and cos of the row.

    Frequencies ``10000^(-i / (C/4))``, i = 0 ... C/4 - 1, as in MoCo v3.
    """
    quarter, dtype = dim // 4, compute_dtype(like)
    frequencies = 10000.0 ** (-torch.arange(quarter, dtype=dtype, device=like.device) / quarter)
    height, width = spatial_shape
    columns = torch.arange(width, dtype=dtype, device=like.device).repeat(height)[:, None] * frequencies
    rows = torch.arange(height, dtype=dtype, device=like.device).repeat_interleave(width)[:, None] * frequencies
    return torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=1).unsqueeze(0).to(like.dtype)


class PlaneNorm(nn.LayerNorm):
    """LayerNorm over the channels of ``(B, C, H, W)``."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class PlaneLinear(nn.Linear):
    """A linear map of the channels of ``(B, C, H, W)``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Convolutions(nn.Sequential):
    """A sequence whose output has the dtype of its weights, even in mixed precision.

    There a convolution returns 16 bits, while a block with LayerScale adds up in fp32: the first block of a stage would
    differ from the others in its rounding and in its compiled code.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self[0].weight.dtype)


class ConvStem(Convolutions):
    """Four 3 x 3 convolutions, the first and last with stride 2, each with BatchNorm, all but the last with GELU.

    Widths are ``dim / 2`` three times, then ``dim``, with ``stride`` 4 in all: the stem of RALA and its successors. For
    small images, which would have hardly a token in the last stages, stride 2 leaves out the first step down and stride
    1 both; the parameters are the same.
    """

    def __init__(self, in_chans: int, dim: int, stride: int = 4) -> None:
        check_choice("stem_stride", stride, tuple(STEM_STRIDES))
        half, (first, last) = dim // 2, STEM_STRIDES[stride]
        steps = [(in_chans, half, first), (half, half, 1), (half, half, 1), (half, dim, last)]
        layers: list[nn.Module] = []
        for i, (inside, outside, stride) in enumerate(steps):
            layers += [nn.Conv2d(inside, outside, 3, stride=stride, padding=1), nn.BatchNorm2d(outside)]
            layers += [nn.GELU()] if i < len(steps) - 1 else []
        super().__init__(*layers)


class ConvMerge(Convolutions):
    """A 3 x 3 convolution with stride 2, and BatchNorm: the step between stages in RALA and its successors."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__(nn.Conv2d(dim, out_dim, 3, stride=2, padding=1), nn.BatchNorm2d(out_dim))


class PatchStep(nn.Module):
    """Non-overlapping patches, LayerNorm and, if ``grid`` is given, learned positions (PVT, Swin).

    Positions are laid out for ``grid`` and resized for other planes.
    """

    def __init__(self, in_chans: int, dim: int, patch_size: int, grid: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.embed = PatchEmbed((patch_size, patch_size), in_chans, dim)
        self.norm = nn.LayerNorm(dim, eps=EPS)
        self.grid = grid
        self.pos_embed = None if grid is None else nn.Parameter(torch.empty(1, grid[0] * grid[1], dim))
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x, shape = self.embed(x)
        x = self.norm(x)
        if self.pos_embed is not None and self.grid is not None:
            x = x + resize_positions(self.pos_embed, self.grid, shape, 0)
        return x.transpose(1, 2).unflatten(2, shape)


class PatchMerge(nn.Module):
    """Four neighbours concatenated, LayerNorm, a linear map without bias (Swin); odd planes are padded with zeros."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.norm = PlaneNorm(4 * dim)
        self.reduction = PlaneLinear(4 * dim, out_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        x = F.pad(x, (0, width % 2, 0, height % 2))
        # In Swin's order: down first, then across.
        x = torch.cat([x[:, :, i::2, j::2] for j in (0, 1) for i in (0, 1)], dim=1)
        return self.reduction(self.norm(x))
