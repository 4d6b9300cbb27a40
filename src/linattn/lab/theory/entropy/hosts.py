"""Vision transformers whose activations are examined: trained briefly for this, or read from a folder."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.tasks.load import load_images
from linattn.lab.theory.entropy.activations import Activations, captured_activations
from linattn.lab.theory.entropy.settings import EntropyConfig
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.loop import train
from linattn.models.vision import VisionTransformer, create_vit
from linattn.support.options import OptionError

OnWork = Callable[[str], None]


def host_activations(config: EntropyConfig, on_work: OnWork) -> list[list[Activations]]:
    """The layers of each host, on the first test images."""
    data = load_images(config.data)
    given = {"epochs": config.epochs, "seed": config.seed, "device": config.device, "precision": "fp32"}
    recipe = TrainConfig.parse({"data": config.data, "compile": False, **given})
    batches = create_batches(data, recipe, torch.device(config.device))
    images = next(iter(batches.test()))[0][: config.images]
    found = []
    for name in config.hosts:
        if config.checkpoint is not None:
            model = _load(config, data, name, config.checkpoint / "weights.pt")
            source = f"{name} from {config.checkpoint.name}"
        else:
            model = _create(config, data, name)
            on_work(f"{name}: training a host on {data.name}")
            with tempfile.TemporaryDirectory() as folder:
                result = train(model, batches, recipe, Path(folder))
            source = f"{name} trained on {data.name}, {result.top1:.1f} %"
        found.append(_double(model, images, source))
    return found


def _double(model: VisionTransformer, images: Tensor, source: str) -> list[Activations]:
    return captured_activations(model.double().eval(), images.to(next(model.parameters())), source)


def _create(
    config: EntropyConfig, data: ImageData | ImageFolders, mechanism: str, pool: str = "avg"
) -> VisionTransformer:
    torch.manual_seed(config.seed)
    shape: dict[str, Any] = {"img_size": data.image_size, "in_chans": data.channels, "num_classes": data.num_classes}
    try:
        return create_vit(config.size, mechanism, patch_size=config.patch_size, global_pool=pool, **shape)
    except ValueError as error:
        raise OptionError("hosts", f"{mechanism} does not fit this host: {error}") from error


def _load(config: EntropyConfig, data: ImageData | ImageFolders, mechanism: str, path: Path) -> VisionTransformer:
    weights = torch.load(path, map_location="cpu", weights_only=True)
    model = _create(config, data, mechanism, "token" if "cls_token" in weights else "avg")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise OptionError(
            "checkpoint", f"{path} does not fit the host; give its mechanism, data, size and patch size: {error}"
        ) from error
    return model.to(config.device)
