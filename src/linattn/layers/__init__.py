"""Layers around a mechanism: projections, positions, local branch, norm, gate; and the other parts of a block."""

from linattn.layers.attention import Attention, AttentionState, LayerOutput
from linattn.layers.block_parts import ConvolutionalPosition, DropPath, LayerScale, Mlp
from linattn.layers.canon import Canon
from linattn.layers.presets import Preset, list_presets, preset

__all__ = [
    "Attention",
    "AttentionState",
    "Canon",
    "ConvolutionalPosition",
    "DropPath",
    "LayerOutput",
    "LayerScale",
    "Mlp",
    "Preset",
    "list_presets",
    "preset",
]
