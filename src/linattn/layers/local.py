"""The local branch: a depthwise convolution of the values, added to the output of attention."""

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.ops.shared.call import hide

KERNELS = ("shared", "channel")


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
