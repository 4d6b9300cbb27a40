"""The models that are timed: a vision transformer, named backbones at four image sizes, a language model."""

from dataclasses import dataclass, replace
from typing import Any

from linattn.models.vision.catalog import TIMM_MODELS
from linattn.support.options import OptionError

SOFTMAX = "softmax"
# Names in the tables -> mechanism and its options, if the name alone does not say.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"gated-head": ("gated", {"gate": "head"})}
DEPTHS = {1: "one block a stage", 2: "two blocks a stage"}
ALL_LINEAR = "_linear"  # ends the name of a pyramid with linear attention in every stage


@dataclass(frozen=True)
class ModelCase:
    """One model at one batch size. Vision: a ``size`` of ``create_vit``, and pixels; language: tokens, and the decoder.

    Backbone: ``size`` is a name of timm's registry without ``linattn_``; its twin is the same model with softmax.
    """

    name: str
    kind: str  # vision, backbone, language
    batch: int
    mechanisms: tuple[str, ...]
    size: str = "small"
    pixels: int = 0
    tokens: int = 0
    depth: int = 30
    width: int = 576
    heads: int = 9
    hidden: int = 1280
    vocabulary: int = 49152

    @property
    def shape(self) -> str:
        if self.kind == "vision":
            return f"ViT-{self.size}, {self.batch} images of {self.pixels} pixels"
        if self.kind == "backbone":
            return f"{self.size}, {self.batch} images of {self.pixels} pixels"
        return f"decoder, {self.depth} layers of {self.width}, {self.batch} x {self.tokens} tokens"

    @property
    def unit(self) -> str:
        return "tokens" if self.kind == "language" else "images"

    @property
    def units(self) -> int:
        """Number of images or tokens in one step."""
        return self.batch * (self.tokens if self.kind == "language" else 1)

    @property
    def checked_depth(self) -> int | None:
        """Blocks per stage of the model checked in place of a backbone, enough for all kinds of blocks; None: its own.

        Deep models take long in plain fp32, and blocks of a stage have the same shapes: they run the same code.
        """
        if self.kind != "backbone":
            return None
        # Every second block with windows is shifted; the first convolution of a stage differs from the others.
        return 2 if self.size.startswith(("polaformer_swin", "qtvit")) else 1

    @property
    def checked_part(self) -> str:
        """What is checked, in words; empty: all of it."""
        return "" if self.checked_depth is None else DEPTHS[self.checked_depth]

    def quick(self) -> "ModelCase":
        """A version small enough for any machine that runs the same code."""
        if self.kind == "vision":
            return replace(self, batch=2, size="digits", pixels=8)
        if self.kind == "backbone":
            return replace(self, batch=2, pixels=64, depth=1)
        return replace(self, batch=2, tokens=24, depth=2, width=32, heads=2, hidden=48, vocabulary=64)


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
GROUP = "backbones"
# The smallest model of every family, and its version with all stages linear if there is one.
GROUP_MODELS = ("nalaformer_xtiny", "nalaformer_xtiny_linear", "polaformerpp_b0", "rala_tiny", "mirrorla_xtiny",
                "mirrorla_xtiny_linear", "polaformer_pvt_tiny", "polaformer_swin_tiny", "qtvit_1",
                "deit_tiny_lion")  # fmt: skip


ALL_MODELS = "presets"
GROUPS = {
    GROUP: GROUP_MODELS,
    ALL_MODELS: tuple(name.removeprefix("linattn_") for name in TIMM_MODELS),
}


def backbone_case(name: str) -> ModelCase | None:
    """The case named like ``nalaformer_tiny-384``, by a name of timm's registry and a size of ``PIXELS``; or None."""
    size, _, pixels = name.rpartition("-")
    model = TIMM_MODELS.get(f"linattn_{size}")
    if model is None or pixels not in map(str, PIXELS):
        return None
    return ModelCase(name, "backbone", PIXELS[int(pixels)], (SOFTMAX, model.mechanism), size, int(pixels), depth=0)


def select(names: tuple[str, ...]) -> list[ModelCase]:
    """The named cases in the order of the table, then backbones in the order given; none: the whole table.

    ``backbones`` stands for the smallest of every family at every size, ``backbones-224`` for these at one size;
    ``presets`` for all models that have a name.
    """
    table = [case for case in CASES if not names or case.name in names]
    others: dict[str, ModelCase] = {}
    for name in names:
        for own in _expanded(name):
            case = backbone_case(own)
            if case is not None:
                others[own] = case
            elif own not in [case.name for case in CASES]:
                groups = [text for group in GROUPS for text in (group, *(f"{group}-{p}" for p in PIXELS))]
                known = ", ".join([*(case.name for case in CASES), *groups])
                sizes = ", ".join(map(str, PIXELS))
                raise OptionError(
                    "cases", f"must be one of {known}, or a model of timm.list_models('linattn_*') without its prefix "
                    f"and one of {sizes}, such as nalaformer_tiny-384, got {name!r}"
                )  # fmt: skip
    return table + list(others.values())


def _expanded(name: str) -> list[str]:
    group, _, pixels = name.partition("-")
    if group not in GROUPS or (pixels and pixels not in map(str, PIXELS)):
        return [name]
    return [f"{model}-{p}" for model in GROUPS[group] for p in ([pixels] if pixels else PIXELS)]


def softmax_model(case: str) -> str:
    """Identifies a case's model with softmax, which is the same for cases that only differ in their linear stages."""
    return case.replace(f"{ALL_LINEAR}-", "-")


def variant(name: str) -> tuple[str, dict[str, Any]]:
    """The mechanism and its options that a name in the tables stands for."""
    return VARIANTS.get(name, (name, {}))
