"""The host of a comparison on images, which is created anew for each run."""

from typing import Any

import torch
from torch import nn

from linattn.lab.compare.settings import PYRAMID, HostConfig
from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.mechanism_options import option_or, own_options
from linattn.models.vision import Pyramid, VisionTransformer, create_pyramid, create_vit
from linattn.models.vision.backbone import stage_grid
from linattn.models.vision.patches import STEM_STRIDES

Host = VisionTransformer | Pyramid
DEFAULT_PRESET = "nala"  # for pyramids
LEAST_PLANE = 2  # fewest tokens on a side in the last stage of a pyramid, as a single token attends only to itself


def create_host(mechanism: str, host: HostConfig, data: ImageData | ImageFolders, seed: int) -> Host:
    """Create a vision transformer or a pyramid for ``data``; only the seed decides its first weights.

    Weights outside of mechanisms start the same for every mechanism, even if a mechanism draws random numbers itself.
    """
    options: dict[str, Any] = {
        "img_size": data.image_size,
        "in_chans": data.channels,
        "num_classes": data.num_classes,
        "global_pool": host.global_pool,
    }
    attention: dict[str, Any] = {} if host.local is None else {"local": host.local}
    own = own_options(mechanism, host.options)
    if own and host.family == PYRAMID:
        options["mechanism_options"] = {mechanism: own}
    elif own:
        attention["mechanism_options"] = own
    if attention:
        options["attention"] = attention
    model: Host
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if host.family == PYRAMID:
            options |= {"stages": host.stages, "stem_stride": stem_stride(host, data.image_size)}
            model = create_pyramid(host.preset or DEFAULT_PRESET, host.size, mechanism, **options)
        else:
            options |= {name: value for name in ("patch_size", "depth") if (value := getattr(host, name)) is not None}
            model = create_vit(host.size, mechanism, preset=host.preset, **options)
        torch.manual_seed(seed)
        if isinstance(model, VisionTransformer):
            for name, module in model.named_modules():
                if isinstance(module, nn.Conv2d | nn.Conv1d) and ".mechanism." not in name:
                    module.reset_parameters()
        model.reset_parameters()
    return model


def stem_stride(host: HostConfig, image_size: tuple[int, int]) -> int:
    """The stem stride of a pyramid: as given, or the greatest with a plane of tokens in the last stage, else 1."""
    if host.patch_size is not None:
        return host.patch_size
    fitting = [s for s in STEM_STRIDES if min(stage_grid(image_size, 3, s)) >= LEAST_PLANE]
    return max(fitting, default=1)


def check_hosts(mechanisms: tuple[str, ...], host: HostConfig, data: ImageData | ImageFolders) -> None:
    """Raise if a mechanism does not fit the host, before any run is trained."""
    for name in mechanisms:
        try:
            create_host(name, host, data, 0)
        except (ValueError, TypeError) as error:
            own = own_options(name, host.options)
            raise option_or("mechanisms", error, name, own) from error


def describe_host(model: Host, image_size: tuple[int, int]) -> dict[str, Any]:
    """The shape of a host in numbers; for a pyramid, lists with one number for each stage."""
    if isinstance(model, VisionTransformer):
        attention: Any = model.blocks[0].attn
        return {
            "tokens": model.num_prefix_tokens + model.grid[0] * model.grid[1],
            "width": model.embed_dim,
            "depth": len(model.blocks),
            "patch_size": list(model.patch_embed.patch_size),
            "heads": attention.num_heads,
        }
    planes = [stage_grid(image_size, i, model.stride) for i in range(len(model.stages))]
    first: list[Any] = [stage.blocks[0] for stage in model.stages]  # type: ignore[index]
    return {
        "tokens": [height * width for height, width in planes],
        "width": [block.attn.dim for block in first],
        "depth": [len(stage.blocks) for stage in model.stages],  # type: ignore[arg-type]
        "patch_size": [model.stride, model.stride],
        "heads": [block.attn.num_heads for block in first],
    }


def layer_to_show(model: Host, image_size: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """The attention layer that is drawn over images, and its plane of tokens.

    It is the last layer of a vision transformer, and in a pyramid the last of the first stage, whose tokens are the
    smallest.
    """
    if isinstance(model, VisionTransformer):
        return len(model.blocks) - 1, model.grid
    return len(model.stages[0].blocks) - 1, stage_grid(image_size, 0, model.stride)  # type: ignore[arg-type]
