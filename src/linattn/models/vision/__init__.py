"""Vision hosts: a plain transformer, and the backbones of the vision papers.

``import linattn.models.vision.timm_models`` puts the backbones into timm's registry.
"""

from linattn.models.vision.efficientvit import EFFICIENTVIT_SIZES, EfficientViT, create_efficientvit
from linattn.models.vision.pvt import PVT_SIZES, PyramidVisionTransformer, create_pvt
from linattn.models.vision.pyramid import Pyramid
from linattn.models.vision.pyramid_sizes import PYRAMID_SIZES, create_pyramid
from linattn.models.vision.sizes import SIZES, create_vit
from linattn.models.vision.swin import SWIN_SIZES, SwinTransformer, create_swin
from linattn.models.vision.vit import VisionTransformer

__all__ = [
    "EFFICIENTVIT_SIZES",
    "PVT_SIZES",
    "PYRAMID_SIZES",
    "SIZES",
    "SWIN_SIZES",
    "EfficientViT",
    "Pyramid",
    "PyramidVisionTransformer",
    "SwinTransformer",
    "VisionTransformer",
    "create_efficientvit",
    "create_pvt",
    "create_pyramid",
    "create_swin",
    "create_vit",
]
