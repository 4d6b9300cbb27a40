"""The models that are timed, in parts that can be compiled: backbones and vision transformers here, text beside it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.models.vision import create_vit
from linattn.models.vision.catalog import TIMM_MODELS
from linattn.support.compiling import compile_blocks
from linattn.support.options import OptionError

SOFTMAX = "softmax"
# Names in the tables -> mechanism and its options, if the name alone does not say.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"gated-head": ("gated", {"gate": "head"})}


def variant(name: str) -> tuple[str, dict[str, Any]]:
    """The mechanism and its options that a name in the tables stands for."""
    return VARIANTS.get(name, (name, {}))


class Host(nn.Module, ABC):
    """``forward(inputs, targets)`` returns the loss; ``blocks`` are what is compiled once for all that are equal."""

    blocks: nn.ModuleList

    @abstractmethod
    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss."""

    def compile_parts(self, **options: Any) -> None:
        """Compile what is before and after the blocks, and block by block: equal blocks share one compiled graph."""
        self.stem = torch.compile(self.stem, **options)  # type: ignore[has-type]
        self.head = torch.compile(self.head, **options)  # type: ignore[has-type]
        compile_blocks(self, **options)


@dataclass(frozen=True)
class ModelCase:
    """One model at one batch size.

    ``size``: one of ``create_vit``, or a name of timm's registry without ``linattn_``; ``tokens``: of the language
    model, which has no pixels.
    """

    name: str
    kind: str  # vision, backbone, language
    batch: int
    mechanisms: tuple[str, ...]
    size: str = "small"
    pixels: int = 0
    tokens: int = 0
    depth: int = 0  # 0: as published

    @property
    def shape(self) -> str:
        if self.kind == "language":
            return f"decoder, {self.batch} x {self.tokens} tokens"
        model = f"ViT-{self.size}" if self.kind == "vision" else self.size
        return f"{model}, {self.batch} images of {self.pixels} pixels"

    @property
    def unit(self) -> str:
        return "tokens" if self.kind == "language" else "images"

    @property
    def units(self) -> int:
        """Number of images or tokens in one step."""
        return self.batch * (self.tokens or 1)

    @property
    def checked_depth(self) -> int | None:
        """Blocks per stage of the model checked in place of a backbone, enough for all kinds of blocks; None: its own.

        Deep models take long in plain fp32, and blocks of a stage have the same shapes: they run the same code.
        """
        if self.kind != "backbone":
            return None
        # Every second block with windows is shifted; the first convolution of a stage differs from the others.
        return 2 if self.size.startswith(("polaformer_swin", "qtvit")) else 1

    def quick(self) -> "ModelCase":
        """A version small enough for any machine that runs the same code."""
        if self.kind == "language":
            return replace(self, batch=2, tokens=24)
        return replace(self, batch=2, pixels=64, depth=1) if self.kind == "backbone" else replace(
            self, batch=2, size="digits", pixels=8
        )  # fmt: skip


VISION = (SOFTMAX, "relu", "nala", "pola", "mirror")
LANGUAGE = (SOFTMAX, "gated-head", "retention", "gated")
CASES = (
    ModelCase("vit-224", "vision", 256, VISION, pixels=224),
    ModelCase("vit-512", "vision", 64, VISION, pixels=512),
    ModelCase("language-8192-b1", "language", 1, LANGUAGE, tokens=8192),
    ModelCase("language-8192-b4", "language", 4, LANGUAGE, tokens=8192),
)
# Batch sizes by image size, so that all of them have about as many pixels.
PIXELS = {224: 64, 384: 24, 512: 12, 1024: 4}
# The smallest model of every family, and its version with all stages linear if there is one; and all.
SMALLEST = ("nalaformer_xtiny", "nalaformer_xtiny_linear", "polaformerpp_b0", "rala_tiny", "mirrorla_xtiny",
            "mirrorla_xtiny_linear", "polaformer_pvt_tiny", "polaformer_swin_tiny", "qtvit_1",
            "deit_tiny_lion")  # fmt: skip
GROUPS = {"backbones": SMALLEST, "presets": tuple(name.removeprefix("linattn_") for name in TIMM_MODELS)}


def backbone_case(name: str) -> ModelCase | None:
    """The case named like ``nalaformer_tiny-384``, by a name of timm's registry and a size of ``PIXELS``; or None."""
    size, _, pixels = name.rpartition("-")
    model = TIMM_MODELS.get(f"linattn_{size}")
    if model is None or pixels not in map(str, PIXELS):
        return None
    return ModelCase(name, "backbone", PIXELS[int(pixels)], (SOFTMAX, model.mechanism), size, int(pixels))


def select(names: tuple[str, ...]) -> list[ModelCase]:
    """The named cases in the order of the table, then backbones in the order given; none: the whole table.

    ``backbones`` stands for the smallest of every family at every size, ``backbones-224`` for these at one size;
    ``presets`` for all models that have a name.
    """
    table = {case.name: case for case in CASES}
    others: dict[str, ModelCase] = {}
    for name in names:
        group, _, pixels = name.partition("-")
        known = group in GROUPS and (not pixels or pixels in map(str, PIXELS))
        sizes = [pixels] if pixels else PIXELS
        for own in [f"{model}-{p}" for model in GROUPS[group] for p in sizes] if known else [name]:
            case = backbone_case(own)
            if case is not None:
                others[own] = case
            elif own not in table:
                groups = [text for group in GROUPS for text in (group, *(f"{group}-{p}" for p in PIXELS))]
                raise OptionError(
                    "only", f"must be one of {', '.join([*table, *groups])}, or a model of timm.list_models("
                    f"'linattn_*') without its prefix and one of {', '.join(map(str, PIXELS))}, such as "
                    f"nalaformer_tiny-384, got {name!r}"
                )  # fmt: skip
    return [case for case in CASES if not names or case.name in names] + list(others.values())


class ImageHost(Host):
    """A vision transformer or a backbone with the cross entropy of its classes.

    The model calls its own blocks, as stages step down between them.
    """

    def __init__(self, case: ModelCase, mechanism: str, impl: str, depth: int | None) -> None:
        super().__init__()
        name, own = variant(mechanism)
        depth = depth or case.depth
        entry = TIMM_MODELS.get(f"linattn_{case.size}")
        pyramid = entry is not None and entry.pyramid
        options: dict[str, Any] = {"img_size": case.pixels}
        if pyramid:
            assert entry is not None
            options |= {"impl": impl} | ({"mechanism_options": {name: own}} if own else {})
            options |= {"depths": (depth,) * entry.num_depths} if depth else {}
        else:
            options["attention"] = {"impl": impl} | ({"mechanism_options": own} if own else {})
            options |= {"depth": depth} if depth else {}
        if entry is None:
            model: Any = create_vit(case.size, name, **options)
        else:
            model = entry(mechanism=name, drop_path_rate=0.0, **options)
        self.model = model
        stages = model.stages if pyramid else [model]
        self.blocks = nn.ModuleList(block for stage in stages for block in stage.blocks)
        steps = [stage.downsample for stage in stages if hasattr(stage, "downsample")]
        self.steps = nn.ModuleList([model.stem if pyramid else model.patch_embed, *steps])
        self.stem, self.head = model.forward_features, model.forward_head

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stem(inputs)).float(), targets)

    def compile_parts(self, **options: Any) -> None:
        """Compile steps down, blocks and head, each in place."""
        self.head = torch.compile(self.head, **options)
        for step in self.steps:
            if not isinstance(step, nn.Identity):
                step.compile(**options)
        compile_blocks(self, **options)


def create_image_host(
    case: ModelCase, mechanism: str, device: torch.device, seed: int, *, impl: str = "auto", depth: int | None = None
) -> ImageHost:
    """Build a model in fp32, ready to train; on one device all forms of a mechanism get the same weights."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        host = ImageHost(case, mechanism, impl, depth)
    return host.to(device)  # for tensors that a constructor has put elsewhere


def draw_images(case: ModelCase, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images and classes on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    channels, classes = (1, 10) if case.size == "digits" else (3, 1000)
    images = torch.randn(case.batch, channels, case.pixels, case.pixels, generator=generator, device=device)
    return images, torch.randint(classes, (case.batch,), generator=generator, device=device)
