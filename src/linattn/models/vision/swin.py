"""Swin as a host: that of PolaFormer, with any mechanism in every stage; and softmax inside shifted windows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.attention import Attention
from linattn.layers.plane import check_plane
from linattn.layers.presets import preset as find_preset
from linattn.layers.rotary import SequenceRotary
from linattn.models.vision.backbone import Backbone, stage_grid
from linattn.models.vision.block import Block
from linattn.models.vision.heads import Head
from linattn.models.vision.patches import PatchMerge, PatchStep, PlaneNorm, pair
from linattn.models.vision.stage import Stage, check_stages, fitting_parts, stage_attentions, stage_rates
from linattn.ops.shared.call import check_choice

SWIN_SIZES: dict[str, dict[str, Any]] = {
    "t": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24), "drop_path_rate": 0.2},
    "s": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24), "drop_path_rate": 0.3},
    "b": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32), "drop_path_rate": 0.5},
}


class SwinTransformer(Backbone):
    """Swin: four stages of plain blocks, with softmax in shifted windows and other mechanisms over the whole plane.

    Patches of 4 with LayerNorm, neighbours merged between stages, LayerNorm, a mean, a classifier. A softmax stage has
    windows with relative positions, shifted in every second block, which is Swin itself (``mechanism="softmax"``).
    Other mechanisms have the parts of ``preset`` around them and see all tokens; PolaFormer's code gives its two linear
    stages windows of 56 tokens, which at its 224 pixels is the whole plane. LayerNorm has eps 1e-6, in Swin 1e-5.
    Papers: Liu et al., Swin Transformer; Meng et al., PolaFormer, for the host.

    Args:
        mechanism: a name of ``linattn.list_mechanisms()`` for the stages marked l, or one name per stage.
        stages: a letter per stage: l for ``mechanism``, s for softmax.
        preset: parts around a mechanism that is not softmax.
        embed_dim: width of the first stage; each further stage doubles it.
        depths, num_heads: of the four stages.
        window: tokens down and across the windows of softmax.
        mlp_ratio: width of the feed-forward part over that of the stage.
        img_size: image size that learned key positions are laid out for; they are interpolated for other sizes.
        in_chans, num_classes, global_pool, drop_rate, drop_path_rate: as in timm.
        attention: options of ``linattn.layers.Attention`` that override the preset's.
        mechanism_options: options of mechanisms, by their names; softmax in windows has none.
        impl: form of the algebra, in every stage whose mechanism has it.

    Example:
        >>> import torch
        >>> from linattn.models.vision import create_swin
        >>> model = create_swin("t", "relu", depths=(1, 1, 2, 1), num_classes=10)
        >>> model(torch.randn(1, 3, 64, 50)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        mechanism: str | Sequence[str] = "pola",
        *,
        stages: str = "llss",
        preset: str = "pola",
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window: int = 7,
        mlp_ratio: float = 4.0,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        attention: Mapping[str, Any] | None = None,
        mechanism_options: Mapping[str, Mapping[str, Any]] | None = None,
        impl: str = "auto",
    ) -> None:
        attentions = stage_attentions(mechanism, stages, mechanism_options=mechanism_options, impl=impl)
        check_stages(len(attentions), depths=depths, num_heads=num_heads)
        if (mechanism_options or {}).get("softmax"):
            raise ValueError("mechanism_options has 'softmax', but softmax in windows has no options of its own")
        dims = [embed_dim * 2**i for i in range(len(attentions))]
        parts, size = find_preset(preset), pair("img_size", img_size)
        built = []
        for i, (own, rates) in enumerate(zip(attentions, stage_rates(drop_path_rate, depths), strict=True)):
            wanted = parts.attention_options(stage_grid(size, i))
            options = fitting_parts(wanted, own, dims[i], num_heads[i], attention)
            blocks: list[nn.Module] = []
            for j, rate in enumerate(rates):
                shape: dict[str, Any] = {"mlp_ratio": mlp_ratio, "drop_path": rate}
                if own.mechanism == "softmax":
                    shift = window // 2 if j % 2 else 0
                    blocks.append(WindowBlock(dims[i], num_heads[i], window=window, shift=shift, **shape))
                else:
                    shape |= parts.block
                    blocks.append(Block(dims[i], num_heads[i], own.mechanism, attention=options, **shape))
            built.append(Stage(PatchMerge(dims[i - 1], dims[i]) if i else nn.Identity(), blocks))
        stem = PatchStep(in_chans, embed_dim, 4)
        head = Head(dims[-1], num_classes, drop_rate=drop_rate, global_pool=global_pool)
        norm = PlaneNorm(dims[-1])
        super().__init__(stem, built, head, dims=dims, in_chans=in_chans, num_classes=num_classes, norm=norm)
        self.init_small(nn.Linear)


def create_swin(size: str = "t", mechanism: str | Sequence[str] = "pola", **options: Any) -> SwinTransformer:
    """Build a :class:`SwinTransformer` of a known size, a key of ``SWIN_SIZES``.

    PolaFormer-Swin-S and -B have 50.6 M and 89.1 M parameters here, and 50 M and 88 M as published, which seems to
    leave out learned key positions (0.9 M and 1.2 M at 224 pixels).

    Example:
        >>> from linattn.models.vision import create_swin
        >>> model = create_swin("t", num_classes=10)  # PolaFormer-Swin-T
        >>> [type(stage.blocks[0].attn).__name__ for stage in model.stages]
        ['Attention', 'Attention', 'WindowAttention', 'WindowAttention']
    """
    check_choice("size", size, tuple(SWIN_SIZES))
    return SwinTransformer(mechanism, **(SWIN_SIZES[size] | options))


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
        rotation: SequenceRotary | None = None,
    ) -> Tensor:
        """Attention of ``x (B, T, C)``; ``spatial_shape`` is the plane of the tokens."""
        if key_mask is not None or cu_seqlens is not None or rotation is not None:
            raise ValueError("windows cut a whole plane: key_mask, cu_seqlens and rotation must be None")
        check_plane(x.shape[1], spatial_shape, 0, "a window")
        assert spatial_shape is not None
        assert self.qkv is not None
        down, across = (min(self.window, n) for n in spatial_shape)
        shifts = tuple(self.shift if n > self.window else 0 for n in spatial_shape)
        height, width = spatial_shape
        fill = (-height % down, -width % across)
        plane = F.pad(x.unflatten(1, spatial_shape), (0, 0, 0, fill[1], 0, fill[0]))
        plane = plane.roll((-shifts[0], -shifts[1]), (1, 2)) if any(shifts) else plane
        rows, columns = plane.shape[1] // down, plane.shape[2] // across
        q, k, v = self._heads(self.qkv(_cut(plane, down, across)))  # (B windows, H, down across, D)
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
