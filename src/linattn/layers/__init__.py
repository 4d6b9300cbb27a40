"""Layers around a mechanism: projections, positions, local branch, norm, gate; and the other parts of a block."""

from linattn.layers.attention import Attention, LayerOutput
from linattn.layers.canon import Canon
from linattn.layers.cpe import ConvolutionalPosition
from linattn.layers.drop_path import DropPath
from linattn.layers.layer_scale import LayerScale
from linattn.layers.mlp import Mlp
from linattn.layers.presets import Preset, list_presets, preset

__all__ = [
    "Attention",
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
