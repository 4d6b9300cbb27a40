"""Vision models: a plain transformer, the backbones of the vision papers, and conversion of timm's own models.

``import linattn.models.vision.timm_models`` adds the backbones to timm's registry.
"""

import importlib
from typing import Any

from linattn.models.vision.efficientvit import EFFICIENTVIT_SIZES, EfficientViT, create_efficientvit
from linattn.models.vision.export import export_onnx, export_program
from linattn.models.vision.pvt import PVT_SIZES, PyramidVisionTransformer, create_pvt
from linattn.models.vision.pyramid import PYRAMID_SIZES, Pyramid, create_pyramid
from linattn.models.vision.swin import SWIN_SIZES, SwinTransformer, create_swin
from linattn.models.vision.vit import SIZES, VisionTransformer, create_deit_lion, create_vit

__all__ = [
    "EFFICIENTVIT_SIZES",
    "PVT_SIZES",
    "PYRAMID_SIZES",
    "SIZES",
    "SWIN_SIZES",
    "ConversionReport",
    "EfficientViT",
    "Pyramid",
    "PyramidVisionTransformer",
    "SwinTransformer",
    "VisionTransformer",
    "convert",
    "create_deit_lion",
    "create_efficientvit",
    "create_pvt",
    "create_pyramid",
    "create_swin",
    "create_vit",
    "export_onnx",
    "export_program",
    "fold_reflections",
]

_CONVERSION = ("ConversionReport", "convert", "fold_reflections")  # what acts on models, from above


def __getattr__(name: str) -> Any:
    if name in _CONVERSION:
        return getattr(importlib.import_module("linattn.convert.vision"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
