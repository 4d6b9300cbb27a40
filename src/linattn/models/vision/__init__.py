"""Vision hosts."""

from linattn.models.vision.sizes import SIZES, create_vit
from linattn.models.vision.vit import VisionTransformer

__all__ = ["SIZES", "VisionTransformer", "create_vit"]
