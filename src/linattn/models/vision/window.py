"""Swin's attention: softmax inside windows, with relative positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.attention import Attention
from linattn.layers.plane import check_plane
from linattn.models.vision.block import Block


class WindowAttention(Attention):
    """Softmax attention inside windows, with a bias by the relative position of query and key.

    ``softmax_s(q_t . k_s / sqrt(D) + bias[row_t - row_s, column_t - column_s]) v_s`` over the tokens s of t's window

    x is ``(B, T, C)``, and so is the output. ``shift`` moves the borders of the windows by that many tokens; tokens
    that the shift brings together from opposite edges do not see each other. A plane no larger than a window is one
    window without a shift. Padding of the last windows is never seen. Paper: Liu et al., Swin Transformer.

    Args:
        dim, num_heads: width and number of heads.
        window: tokens down and across a window.
        shift: less than ``window``.
    """

    def __init__(self, dim: int, num_heads: int, window: int, shift: int = 0) -> None:
        super().__init__(dim, num_heads, "softmax")
        if not isinstance(window, int) or window < 1 or not 0 <= shift < window:
            raise ValueError(f"window must be an integer >= 1 and shift from 0 to window - 1, got {window} and {shift}")
        self.window, self.shift = window, shift
        self.relative_position_bias = nn.Parameter(torch.empty((2 * window - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.relative_position_bias, std=0.02)

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        spatial_shape: tuple[int, int] | None = None,
    ) -> Tensor:
        """Attention of ``x (B, T, C)``; ``spatial_shape`` is the plane of the tokens."""
        if key_mask is not None or cu_seqlens is not None:
            raise ValueError("windows cut a whole plane: key_mask and cu_seqlens must be None")
        check_plane(x.shape[1], spatial_shape, 0, "a window")
        assert spatial_shape is not None
        down, across = (min(self.window, n) for n in spatial_shape)
        shifts = tuple(self.shift if n > self.window else 0 for n in spatial_shape)
        height, width = spatial_shape
        fill = (-height % down, -width % across)
        plane = F.pad(x.unflatten(1, spatial_shape), (0, 0, 0, fill[1], 0, fill[0]))
        plane = plane.roll((-shifts[0], -shifts[1]), (1, 2)) if any(shifts) else plane
        rows, columns = plane.shape[1] // down, plane.shape[2] // across
        q, k, v, *_ = self._project(_cut(plane, down, across), None, None)  # (B windows, H, down across, D)
        bias = self._bias(down, across).to(q.dtype)
        if any(shifts) or any(fill):
            labels = [_labels(n, w, s, x.device) for n, w, s in zip(spatial_shape, (down, across), shifts, strict=True)]
            bias = bias + _mask(labels[0], labels[1], down, across).to(q.dtype)
        q, k, v = (t.unflatten(0, (-1, rows * columns)) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, bias)
        out = self.proj(out.transpose(2, 3).flatten(3))  # (B, windows, down across, C)
        out = out.unflatten(2, (down, across)).unflatten(1, (rows, columns)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        out = out.roll(shifts, (1, 2)) if any(shifts) else out
        return out[:, :height, :width].flatten(1, 2)

    def _bias(self, down: int, across: int) -> Tensor:
        """``(H, down across, down across)``; a window that a small plane cuts short uses the middle of the table."""
        device, span = self.relative_position_bias.device, 2 * self.window - 1
        rows = torch.arange(down, device=device).repeat_interleave(across)
        columns = torch.arange(across, device=device).repeat(down)
        offset = (rows[:, None] - rows + self.window - 1) * span + columns[:, None] - columns + self.window - 1
        return self.relative_position_bias[offset].permute(2, 0, 1)


class WindowBlock(Block):
    """A :class:`Block` whose attention is a :class:`WindowAttention`."""

    def __init__(
        self, dim: int, num_heads: int, *, window: int, shift: int, mlp_ratio: float = 4.0, drop_path: float = 0.0
    ) -> None:
        super().__init__(dim, num_heads, "softmax", mlp_ratio=mlp_ratio, drop_path=drop_path)
        self.attn = WindowAttention(dim, num_heads, window, shift)


def _cut(plane: Tensor, down: int, across: int) -> Tensor:
    """``(B, rows down, columns across, C)`` to ``(B rows columns, down across, C)``."""
    cut = plane.unflatten(2, (-1, across)).unflatten(1, (-1, down))  # (B, rows, down, columns, across, C)
    return cut.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def _labels(length: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Label each place of a padded and shifted side by the stretch it comes from; other stretches are hidden."""
    filled = length + -length % window
    place = (torch.arange(filled, device=device) + shift) % filled  # which token the shift brings here
    wrapped = torch.arange(filled, device=device) >= filled - shift
    return torch.where(place >= length, 2, wrapped.long())  # 2: padding


def _mask(rows: Tensor, columns: Tensor, down: int, across: int) -> Tensor:
    """0 where a token sees another, -inf elsewhere: ``(windows, 1, down across, down across)``."""
    labels = rows[:, None] * 3 + columns
    own = _cut(labels[None, :, :, None], down, across).squeeze(-1)  # (windows, down across)
    return torch.zeros((), device=rows.device).masked_fill(own[:, None, :, None] != own[:, None, None, :], -torch.inf)
