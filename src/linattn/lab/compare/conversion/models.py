"""The models of a conversion: timm's DeiT, before and after."""

from typing import Any

import torch
from torch import nn

from linattn.lab.compare.conversion.settings import ConversionConfig
from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.models.vision import ConversionReport, convert
from linattn.support.extras import need


def create_deit(config: ConversionConfig, data: ImageData | ImageFolders, seed: int) -> nn.Module:
    """Create timm's DeiT for small images, with first weights by ``seed``; it classifies from a class token."""
    need("a conversion", "timm")
    import timm

    options: dict[str, Any] = {} if config.depth is None else {"depth": config.depth}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = timm.create_model(
            f"deit_{config.size}_patch16_224", img_size=tuple(data.image_size), patch_size=config.patch_size,
            in_chans=data.channels, num_classes=data.num_classes, **options,
        )  # fmt: skip
    return model


def convert_model(
    model: nn.Module, config: ConversionConfig, mechanism: str, seed: int
) -> tuple[nn.Module, ConversionReport]:
    """Convert ``model`` to another mechanism, in place; the seed decides weights that are new."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return convert(model, mechanism, **config.options.get(mechanism, {}))
