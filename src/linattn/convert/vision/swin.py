"""Swin: windows, a bias of scores inside them, and a mask where a shift brings opposite edges together."""

from typing import Any

import torch
from torch import Tensor, nn

from linattn.convert.vision.attend import holds_bias
from linattn.convert.vision.base import ConvertedAttention, Plan
from linattn.convert.vision.beit import TABLE, position_bias

PARTS = 4  # a shift cuts a window at most once down and once across


class WindowedAttention(ConvertedAttention):
    """Converted form of ``timm.models.swin_transformer.WindowAttention``: x ``(B windows, T, C)``, in the same windows.

    A mechanism without scores attends inside each part into which the mask divides a window, one part after the other.
    To let it see the whole plane instead, make windows larger by timm's ``model.set_input_size(window_size=...)``.
    """

    biases = {"relative_position_bias_table": TABLE, "relative_position_index": TABLE}  # noqa: RUF012

    def __init__(self, old: nn.Module, plan: Plan) -> None:
        super().__init__(old, plan)
        self.window_size = _pair(old.window_size)

    @property
    def own_prefix(self) -> int:
        return 0  # a window has no tokens before its plane

    @property
    def input_dim(self) -> int:
        return self.qkv.weight.shape[1]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.heads(t, self.num_heads) for t in self.qkv(x).chunk(3, dim=-1))
        if holds_bias(self.mechanism):
            return self.finish(self.attend(q, k, v, x, bias=self._bias(x.shape[0], mask)), x)
        if mask is None:
            return self.finish(self.attend(q, k, v, x, spatial_shape=self.window_size), x)
        parts = window_parts(mask).repeat(x.shape[0] // mask.shape[0], 1)  # (B windows, T)
        total: Tensor | None = None
        for part in range(PARTS):
            own = parts == part
            # Windows without that part see all of themselves: their result is not used, but must be finite.
            seen = own | ~own.any(-1, keepdim=True)
            out = self.attend(q, k, v, x, key_mask=seen, spatial_shape=self.window_size)
            total = out if total is None else torch.where(own.unsqueeze(-1), out, total)
        assert total is not None
        return self.finish(total, x)

    def _bias(self, batch: int, mask: Tensor | None) -> Tensor | None:
        bias = position_bias(self)
        if mask is None:
            return bias
        each = mask.unsqueeze(1).repeat(batch // mask.shape[0], 1, 1, 1)  # (B windows, 1, T, T)
        return each if bias is None else bias + each

    def set_window_size(self, window_size: int | tuple[int, int]) -> None:
        """Called by timm for other image sizes; a table of positions is resized, as in timm."""
        window_size = _pair(window_size)
        if window_size == self.window_size:
            return
        table: Any = self.relative_position_bias_table
        if table is not None:
            from timm.layers.pos_embed_rel import resize_rel_pos_bias_table
            from timm.models.swin_transformer import get_relative_position_index

            down, across = window_size
            shape = ((2 * down - 1) * (2 * across - 1), self.num_heads)
            new = resize_rel_pos_bias_table(table.detach(), new_window_size=window_size, new_bias_shape=shape)
            self.relative_position_bias_table = nn.Parameter(new)
            index = get_relative_position_index(down, across, device=table.device)
            self.register_buffer("relative_position_index", index, persistent=False)
        self.window_size = window_size


def _pair(size: Any) -> tuple[int, int]:
    down, across = (size, size) if isinstance(size, int) else size
    return int(down), int(across)


def window_parts(mask: Tensor) -> Tensor:
    """Number the parts of windows: a label per token ``(windows, T)``, from masks ``(windows, T, T)`` of 0 and less.

    Tokens of one part see the same tokens. The first of these identifies the part, and parts are numbered in order.
    """
    first = (mask == 0).int().argmax(-1)
    leads = first == torch.arange(mask.shape[-1], device=mask.device)
    return (leads.long().cumsum(-1) - 1).gather(-1, first)
