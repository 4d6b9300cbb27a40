"""Steps down in resolution: ``(B, C, H, W)`` to ``(B, C', ceil(H / stride), ceil(W / stride))``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.norms import EPS
from linattn.models.vision.channels import PlaneLinear, PlaneNorm
from linattn.models.vision.patch import PatchEmbed
from linattn.models.vision.position import resize_positions
from linattn.ops.shared.checks import check_choice

# Strides of the first and last convolution, by the stride of the whole stem. The first step down is the first to be
# left out: all convolutions then see every pixel.
STEM_STRIDES = {4: (2, 2), 2: (1, 2), 1: (1, 1)}


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
        self.reset_parameters()

    def reset_parameters(self) -> None:
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
