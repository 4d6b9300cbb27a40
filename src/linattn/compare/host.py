"""The host of a comparison, built anew for each run."""

from typing import Any

import torch
from torch import nn

from linattn.compare.settings import HostConfig
from linattn.models.vision import VisionTransformer, create_vit
from linattn.support.options import OptionError
from linattn.tasks.images import ImageData, ImageFolders


def create_host(mechanism: str, host: HostConfig, data: ImageData | ImageFolders, seed: int) -> VisionTransformer:
    """A vision transformer for ``data``; the seed decides its first weights, whatever ran before.

    All that mechanisms do not own starts the same for each of them, also beside one that draws numbers for itself.
    """
    options: dict[str, Any] = {
        "img_size": data.image_size,
        "in_chans": data.channels,
        "num_classes": data.num_classes,
        "global_pool": host.global_pool,
    }
    options |= {name: value for name in ("patch_size", "depth") if (value := getattr(host, name)) is not None}
    if host.local is not None:
        options["attention"] = {"local": host.local}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = create_vit(host.size, mechanism, preset=host.preset, **options)
        torch.manual_seed(seed)
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d | nn.Conv1d) and ".mechanism." not in name:
                module.reset_parameters()
        model.reset_parameters()
    return model


def check_hosts(mechanisms: tuple[str, ...], host: HostConfig, data: ImageData | ImageFolders) -> None:
    """Raise for a mechanism that does not fit the host, before any of them is trained."""
    for name in mechanisms:
        try:
            create_host(name, host, data, 0)
        except ValueError as error:
            raise OptionError("mechanisms", f"{name} does not fit this host: {error}") from error


def tokens_of(model: VisionTransformer) -> int:
    return model.num_prefix_tokens + model.grid[0] * model.grid[1]
