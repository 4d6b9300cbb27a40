"""The parts that papers put around the mechanism of an attention layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.norms import create_norm
from linattn.layers.plane import to_plane, wipe
from linattn.ops.shared.call import hide

KERNELS = ("shared", "channel")
ACTIVATIONS = ("linear", "silu")


class KeyPosition(nn.Module):
    """Learned position embedding ``k + E`` for k ``(B, H, T, D)``; E is learned on a grid and starts at 0.

    E is resized to planes of another shape. Prefix tokens have no embedding. FLatten, PolaFormer and QT-ViT use it.
    """

    def __init__(self, num_heads: int, head_dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, num_heads * head_dim, *grid))

    def forward(self, k: Tensor, *, spatial_shape: tuple[int, int], num_prefix_tokens: int = 0) -> Tensor:
        grid: Tensor = self.weight
        if tuple(grid.shape[2:]) != spatial_shape:
            grid = F.interpolate(grid, size=spatial_shape, mode="bicubic")
        embedding = grid.flatten(2).transpose(1, 2).unflatten(2, (k.shape[1], k.shape[3])).transpose(1, 2)
        return k + F.pad(embedding, (0, 0, num_prefix_tokens, 0)).to(k.dtype)


class LocalBranch(nn.Module):
    """Local branch: a depthwise convolution of v over the plane, 0 at prefix tokens.

    v ``(B, H, T, D)`` to ``(B, H, T, D)``. ``kernels="shared"``: D kernels that all heads share (FLatten,
    PolaFormer); ``"channel"``: H D kernels, one per channel (LePE: NaLaFormer, RALA). It adds rank and sharpness that
    linear attention lacks.
    """

    def __init__(self, num_heads: int, head_dim: int, kernels: str = "shared", kernel_size: int = 5) -> None:
        super().__init__()
        channels = head_dim if kernels == "shared" else num_heads * head_dim
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)

    def forward(
        self,
        v: Tensor,
        *,
        spatial_shape: tuple[int, int],
        output_shape: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """``output_shape``: the plane of the queries if v has a reduced plane; v is then resized to it."""
        B, H, _, D = v.shape
        plane = hide(v, key_mask)[:, :, num_prefix_tokens:].transpose(2, 3)  # (B, H, D, height width)
        # With shared kernels the heads are separate images, otherwise they are more channels.
        plane = plane.reshape(-1, self.conv.in_channels, *spatial_shape)
        if output_shape is not None and output_shape != spatial_shape:
            plane = F.interpolate(plane, size=output_shape, mode="bilinear")
        out = self.conv(plane).reshape(B, H, D, -1).transpose(2, 3)
        return F.pad(out, (0, 0, num_prefix_tokens, 0))


class SpatialReduction(nn.Module):
    """Spatial reduction to one token for every ``ratio x ratio`` of the plane: strided convolution, then LayerNorm.

    x ``(B, T, C)`` to ``(B, T', C)``; prefix tokens are kept and normed with the others. A plane that ``ratio`` does
    not divide is filled up with zeros at its end. A reduced token of padding only is padding itself. Paper: Wang et
    al., Pyramid Vision Transformer.
    """

    def __init__(self, dim: int, ratio: int, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.ratio, self.num_prefix_tokens = ratio, num_prefix_tokens
        self.conv = nn.Conv2d(dim, dim, ratio, stride=ratio)
        self.norm = create_norm("layer", dim)

    def reduced_shape(self, spatial_shape: tuple[int, int]) -> tuple[int, int]:
        height, width = (-(-n // self.ratio) for n in spatial_shape)
        return height, width

    def forward(
        self, x: Tensor, *, spatial_shape: tuple[int, int], key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The reduced tokens and their mask."""
        prefix = self.num_prefix_tokens
        plane = self._fill(to_plane(wipe(x, key_mask), spatial_shape, prefix))
        tokens = torch.cat([x[:, :prefix], self.conv(plane).flatten(2).transpose(1, 2)], dim=1)
        if key_mask is not None:
            real = self._fill(key_mask[:, prefix:].unflatten(1, spatial_shape)[:, None].to(x.dtype))
            real = F.max_pool2d(real, self.ratio).flatten(1) > 0
            key_mask = torch.cat([key_mask[:, :prefix], real], dim=1)
        return self.norm(tokens), key_mask

    def _fill(self, plane: Tensor) -> Tensor:
        height, width = plane.shape[2:]
        return F.pad(plane, (0, -width % self.ratio, 0, -height % self.ratio))


class OutputGate(nn.Module):
    """Output gate ``o * act(W x + b)`` for o ``(B, T, width)`` and x ``(B, T, dim)``.

    ``activation`` is ``"linear"``, none (PolaFormer, RALA), or ``"silu"`` (NaLaFormer, RetNet).
    """

    def __init__(self, dim: int, width: int, activation: str = "linear") -> None:
        super().__init__()
        self.activation = activation
        self.proj = nn.Linear(dim, width)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.proj(x)
        return o * (F.silu(gate) if self.activation == "silu" else gate)
