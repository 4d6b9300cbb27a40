"""The host of training on images: a vision transformer or a pyramid around a mechanism, the same for every one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import nn

from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.config import streamed
from linattn.layers.attention_parts import KERNELS
from linattn.layers.presets import list_presets
from linattn.models.vision import Pyramid, VisionTransformer, create_pyramid, create_vit
from linattn.models.vision.backbone import stage_grid
from linattn.models.vision.patches import STEM_STRIDES
from linattn.models.vision.pyramid import PYRAMID_SIZES
from linattn.models.vision.vit import POOLS, SIZES
from linattn.support.config import Config, option
from linattn.support.options import OptionError, check_option

Host = VisionTransformer | Pyramid
PYRAMID = "pyramid"
_of_host = partial(option, group="Host")
LEAST_PLANE = 2  # fewest tokens on a side in the last stage of a pyramid, as a single token attends only to itself


@dataclass(frozen=True, kw_only=True)
class VisionHost(Config):
    """The options of a host."""

    host: Literal["vit", "pyramid"] = _of_host("vit", "Pyramid: NaLaFormer's four stages and its relatives.")
    size: str = _of_host(
        "digits", "digits, pico, nano, tiny, small or base; of a pyramid xt, t, s, b or l.", default_text="by data; xt"
    )
    stages: str = _of_host(
        "", "Stages of a pyramid, a letter each: l, the mechanism; s, softmax.", rare=True, default_text="llss"
    )
    patch_size: int | None = _of_host(
        None,
        "Pixels of a token's side; in the first stage of a pyramid 4, 2 or 1.",
        least=1,
        default_text="by size; of a pyramid 4, less where the last stage would be one token",
    )
    depth: int | None = _of_host(None, "Blocks of the host.", least=1, default_text="by size")
    global_pool: str = _of_host("avg", "token: a class token.", choices=tuple(sorted(POOLS)), rare=True)
    preset: str | None = _of_host(
        None, "A paper's block around every mechanism.", choices=list_presets, default_text="none; of a pyramid nala"
    )
    local: str | None = _of_host(None, "A depthwise convolution of v beside each mechanism.", choices=tuple(KERNELS))
    drop_path: float = _of_host(0.0, "Rate at which an image skips a branch in training.", least=0, below=1, rare=True)

    @classmethod
    def parse(cls, texts: Mapping[str, Any]) -> Self:
        """The size follows from the data where it is not given."""
        if not texts.get("size"):
            data = str(texts.get("data", "digits"))
            size = "digits" if data == "digits" else "tiny" if streamed(data) else "nano"
            texts = {**texts, "size": "xt" if texts.get("host") == PYRAMID else size}
        return super().parse(texts)

    def check(self) -> None:
        super().check()
        check_option("size", self.size, PYRAMID_SIZES if self.host == PYRAMID else SIZES)
        if self.host != PYRAMID:
            if self.stages:
                raise OptionError("stages", f"are those of a pyramid, but the host is {self.host}")
            return
        if self.depth is not None:
            raise OptionError("depth", "is that of a vision transformer; a pyramid has the depths of its size")
        check_option("global_pool", self.global_pool, ("avg",))
        check_option("patch_size", self.patch_size, (None, *STEM_STRIDES))
        if self.stages and not re.fullmatch("[ls]{4}", self.stages):
            raise OptionError("stages", f"must be four letters, l (mechanism) or s (softmax), got {self.stages!r}")

    def create(
        self, mechanism: str, data: ImageData | ImageFolders, seed: int, options: Mapping[str, Any] | None = None
    ) -> Host:
        """Create the host for ``data``; only the seed decides its first weights.

        Weights outside of mechanisms start the same for every mechanism, even if a mechanism draws random numbers
        itself. ``options``: those of the mechanism.
        """
        attention: dict[str, Any] = {} if self.local is None else {"local": self.local}
        chosen: dict[str, Any] = {"attention": attention}
        if self.drop_path:
            chosen["drop_path_rate"] = self.drop_path
        if options and self.host == PYRAMID:
            chosen["mechanism_options"] = {mechanism: dict(options)}
        elif options:
            attention["mechanism_options"] = dict(options)
        chosen |= {"img_size": data.image_size, "in_chans": data.channels, "num_classes": data.num_classes}
        chosen["global_pool"] = self.global_pool
        model: Host
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if self.host == PYRAMID:
                chosen |= {"stages": self.stages or "llss", "stem_stride": self.stem_stride(data.image_size)}
                model = create_pyramid(self.preset or "nala", self.size, mechanism, **chosen)
            else:
                shape = {"patch_size": self.patch_size, "depth": self.depth}
                chosen |= {name: value for name, value in shape.items() if value is not None}
                model = create_vit(self.size, mechanism, preset=self.preset, **chosen)
            torch.manual_seed(seed)
            if isinstance(model, VisionTransformer):
                for name, module in model.named_modules():
                    if isinstance(module, nn.Conv2d | nn.Conv1d) and ".mechanism." not in name:
                        module.reset_parameters()
            model.reset_parameters()
        return model

    def stem_stride(self, image_size: tuple[int, int]) -> int:
        """Of a pyramid: as given, or the greatest with a plane of tokens in the last stage, else 1."""
        if self.patch_size is not None:
            return self.patch_size
        return max((s for s in STEM_STRIDES if min(stage_grid(image_size, 3, s)) >= LEAST_PLANE), default=1)

    def describe_model(self, model: Any, image_size: tuple[int, int]) -> dict[str, Any]:
        """The shape of a host in numbers; for a pyramid, lists with one number for each stage."""
        pyramid = isinstance(model, Pyramid)
        stages: list[Any] = [stage.blocks for stage in model.stages] if pyramid else [model.blocks]
        planes = [stage_grid(image_size, i, model.stride) for i in range(len(stages))] if pyramid else [model.grid]
        prefix = 0 if pyramid else model.num_prefix_tokens
        shape = {
            "tokens": [prefix + height * width for height, width in planes],
            "width": [blocks[0].attn.dim for blocks in stages],
            "depth": [len(blocks) for blocks in stages],
            "heads": [blocks[0].attn.num_heads for blocks in stages],
        }
        named = {"host": self.host, "size": self.size, "preset": self.preset, "local": self.local}
        if not pyramid:
            numbers = {name: values[0] for name, values in shape.items()}
            return {**named, **numbers, "patch_size": list(model.patch_embed.patch_size)}
        return {**named, "stages": self.stages or "llss", **shape, "patch_size": [model.stride, model.stride]}


def layer_to_show(model: Host, image_size: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """The attention layer that is drawn over images, and its plane of tokens.

    It is the last layer of a vision transformer, and in a pyramid the last of the first stage, whose tokens are the
    smallest.
    """
    if isinstance(model, VisionTransformer):
        return len(model.blocks) - 1, model.grid
    return len(model.stages[0].blocks) - 1, stage_grid(image_size, 0, model.stride)  # type: ignore[arg-type]
