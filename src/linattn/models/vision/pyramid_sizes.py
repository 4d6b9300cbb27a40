"""Pyramids by paper and size."""

from collections.abc import Sequence
from typing import Any

from linattn.layers.presets import list_presets
from linattn.layers.presets import preset as find_preset
from linattn.models.vision.pyramid import Pyramid
from linattn.ops.shared.checks import check_choice


def _shape(
    embed_dims: tuple[int, ...],
    depths: tuple[int, ...],
    num_heads: tuple[int, ...],
    drop_path_rate: float,
    init_values: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
) -> dict[str, Any]:
    return {"embed_dims": embed_dims, "depths": depths, "num_heads": num_heads, "drop_path_rate": drop_path_rate,
            "init_values": init_values}  # fmt: skip


_XT = _shape((32, 64, 128, 384), (2, 2, 2, 2), (1, 2, 4, 12), 0.1)
_XT_PAPER = _shape((32, 64, 192, 384), (2, 2, 4, 2), (1, 2, 6, 12), 0.1)
_T = _shape((64, 128, 256, 512), (2, 2, 6, 2), (1, 2, 4, 8), 0.1)
_S = _shape((64, 128, 320, 512), (3, 5, 9, 3), (1, 2, 5, 8), 0.15)
_B = _shape((96, 192, 384, 512), (4, 6, 12, 6), (1, 2, 6, 8), 0.4, (1.0, 1.0, 1e-6, 1e-6))
_L = _shape((96, 192, 448, 640), (4, 7, 19, 8), (1, 2, 7, 10), 0.55, (1e-6, 1e-6, 1e-6, 1e-6))

# xt ... l: RALA, NaLaFormer, MirrorLA. b0 ... b5: the same shapes with PolaFormer++'s wider head.
PYRAMID_SIZES: dict[str, dict[str, Any]] = {
    "xt": _XT,
    "xt_paper": _XT_PAPER,
    "t": _T,
    "s": _S,
    "b": _B,
    "l": _L,
    "b0": _XT | {"head_width": 2048},
    "b1": _XT_PAPER | {"head_width": 2048},
    "b2": _T | {"head_width": 2048},
    "b3": _S | {"head_width": 2048},
    "b4": _B | {"head_width": 2048},
    "b5": _L | {"head_width": 2560},
}
# NaLaFormer has linear maps where the others have 1 x 1 convolutions, which start small, and two wider sizes.
_OF_PRESET: dict[str, dict[str, Any]] = {"nala": {"linear_init": "torch"}}
_OF_BOTH: dict[tuple[str, str], dict[str, Any]] = {
    ("nala", "t"): {"mlp_ratio": 4.0},
    ("nala", "b"): {"mlp_ratio": 4.0},
}


def create_pyramid(
    preset: str = "nala", size: str = "t", mechanism: str | Sequence[str] | None = None, **options: Any
) -> Pyramid:
    """Build a :class:`Pyramid` as a paper describes it.

    ``"nala"``: NaLaFormer, sizes xt, t, s, b, l; ``"pola_plus"``: PolaFormer++, b0 ... b5; ``"rala"``: RAVLT, t, s, b,
    l; ``"mirror"``: MirrorLA, whose own backbone is not public: here it has RAVLT's stages and block, without the
    rotary positions in its attention. Every preset can be built in every size.

    Some published numbers contradict each other. NaLaFormer's size XT has 6.1 M parameters by its code (``"xt"``), but
    8 M and 1.0 G by its paper; the shape of PolaFormer++'s b1 with NaLaFormer's head has 7.8 M and fits
    (``"xt_paper"``). Its size T has 15.9 M and 2.9 G by its code, but 15 M and 2.7 G by its paper, which
    ``mlp_ratio=3.5`` fits. All of these papers call their models linear, but in their code the last two stages are
    softmax. ``stages="llll"`` is linear throughout.

    Args:
        preset: parts of the block (``linattn.layers.list_presets()``).
        size: a key of ``PYRAMID_SIZES``.
        mechanism: as in :class:`Pyramid` (None: the preset's own).
        options: options of :class:`Pyramid`, which override those of preset and size.

    Example:
        >>> from linattn.models.vision import create_pyramid
        >>> model = create_pyramid("nala", "xt", num_classes=10)
        >>> [stage.blocks[0].attn.mechanism.info.name for stage in model.stages]
        ['nala', 'nala', 'softmax', 'softmax']
    """
    check_choice("preset", preset, list_presets())
    check_choice("size", size, tuple(PYRAMID_SIZES))
    if mechanism is None:
        mechanism = find_preset(preset).mechanism
    own = _OF_PRESET.get(preset, {}) | _OF_BOTH.get((preset, size), {})
    return Pyramid(mechanism, **({"preset": preset} | PYRAMID_SIZES[size] | own | options))
