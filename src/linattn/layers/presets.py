"""Presets: the parts that papers put around their mechanisms."""

from dataclasses import dataclass, field
from typing import Any

from linattn.ops.shared.call import check_choice


@dataclass(frozen=True)
class Preset:
    """A mechanism with the parts of its paper's block.

    Attributes:
        mechanism: name of the mechanism.
        attention: options of :class:`linattn.layers.Attention`.
        block: ``cpe``, the number of convolutional positions (1: before the attention, 2: before the feed-forward part
            too), and ``mlp_conv``, a 3 x 3 convolution inside the feed-forward part.
        key_position: whether the keys have a position embedding, on the host's grid.
        global_pool: pooling of the host.
    """

    mechanism: str
    attention: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    key_position: bool = False
    global_pool: str = "avg"  # a class token would not see what convolutions do in the last block

    def attention_options(self, grid: tuple[int, int]) -> dict[str, Any]:
        """Options of ``Attention`` for a host whose tokens lie on ``grid``."""
        return self.attention | ({"key_position": grid} if self.key_position else {})


# RALA's backbone, also used by PolaFormer++, NaLaFormer and MALA: LePE 5 x 5 and rotary positions in the
# attention, a convolutional position before it, a convolution in the feed-forward part.
_RALA_PARTS = {"local": "channel", "rotary": "features", "gate": "linear"}
_RALA_BLOCK = {"cpe": 1, "mlp_conv": True}

_PRESETS = {
    "vit": Preset("softmax", global_pool="token"),
    "flatten": Preset("focused", {"local": "shared"}, key_position=True),
    "pola": Preset("pola", {"local": "shared", "gate": "linear"}, key_position=True),
    "pola_plus": Preset("pola_plus", _RALA_PARTS, _RALA_BLOCK),
    "rala": Preset("rala", _RALA_PARTS, _RALA_BLOCK),
    "mala": Preset("mala", _RALA_PARTS, _RALA_BLOCK),
    "nala": Preset(
        "nala",
        {"local": "channel", "rotary": "blocks", "norm": "layer", "gate": "silu"},
        {"cpe": 2, "mlp_conv": True},
    ),
    # The paper's figure shows only the mechanism and its code is not public, so the parts around it are this library's
    # choice: the local branch, gate and convolutions that its authors' other models share. Those models also have
    # rotary positions, left out here because nothing says how they would combine with the reflections.
    "mirror": Preset("mirror", {"local": "channel", "gate": "linear"}, _RALA_BLOCK),
    "agent": Preset("agent", {"local": "channel", "local_kernel": 3}),
}


def list_presets() -> list[str]:
    """Names of the presets, sorted.

    Example:
        >>> from linattn.layers import list_presets
        >>> "nala" in list_presets()
        True
    """
    return sorted(_PRESETS)


def preset(name: str) -> Preset:
    """The preset ``name``: a mechanism with the parts of its paper's block.

    Example:
        >>> from linattn.layers import Attention, preset
        >>> nala = preset("nala")
        >>> nala.attention["gate"], nala.block["cpe"]
        ('silu', 2)
        >>> layer = Attention(64, 4, "elu", **nala.attention_options((14, 14)))  # its parts, another mechanism
    """
    check_choice("preset", name, list_presets())
    return _PRESETS[name]
