"""Which models are timed: a vision transformer, backbones by name at four sizes of images, a language model."""

from dataclasses import dataclass, replace
from typing import Any

from linattn.models.vision.catalog import TIMM_MODELS
from linattn.support.options import OptionError

SOFTMAX = "softmax"
# Names of the tables -> mechanism and its options, where the name alone does not tell.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"gated-head": ("gated", {"gate": "head"})}
DEPTHS = {1: "one block a stage", 2: "two blocks a stage"}
ALL_LINEAR = "_linear"  # ends the name of a pyramid that has linear attention in every stage


@dataclass(frozen=True)
class ModelCase:
    """One model at one batch. Vision: a ``size`` of ``create_vit``, and pixels; language: tokens, and the decoder.

    Backbone: ``size`` is a name of timm's registry without ``linattn_``; its twin is the same model on softmax.
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
        """Of one step."""
        return self.batch * (self.tokens if self.kind == "language" else 1)

    @property
    def checked_depth(self) -> int | None:
        """Blocks a stage of the model that is checked in the place of a backbone: all kinds of blocks; None: its own.

        Deep ones take long in plain fp32, and blocks of a stage have the same shapes: they run the same code.
        """
        if self.kind != "backbone":
            return None
        # Of windows every second is shifted; the first convolution of a stage is not like the others.
        return 2 if self.size.startswith(("polaformer_swin", "qtvit")) else 1

    @property
    def checked_part(self) -> str:
        """In words; nothing: all of it."""
        return "" if self.checked_depth is None else DEPTHS[self.checked_depth]

    def quick(self) -> "ModelCase":
        """Small enough for any machine; what runs is the same."""
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


# Images that a batch holds at each size, so that all sizes are about as many pixels.
PIXELS = {224: 64, 384: 24, 512: 12, 1024: 4}
GROUP = "backbones"
# The smallest of every family, and all of its stages linear where there is such a one.
GROUP_MODELS = ("nalaformer_xtiny", "nalaformer_xtiny_linear", "polaformerpp_b0", "rala_tiny", "mirrorla_xtiny",
                "mirrorla_xtiny_linear", "polaformer_pvt_tiny", "polaformer_swin_tiny", "qtvit_1",
                "deit_tiny_lion")  # fmt: skip


ALL_MODELS = "presets"
GROUPS = {
    GROUP: GROUP_MODELS,
    ALL_MODELS: tuple(name.removeprefix("linattn_") for name in TIMM_MODELS),
}


def backbone_case(name: str) -> ModelCase | None:
    """``nalaformer_tiny-384``, for any name of timm's registry and any size of ``PIXELS``; None: it is no such name."""
    size, _, pixels = name.rpartition("-")
    model = TIMM_MODELS.get(f"linattn_{size}")
    if model is None or pixels not in map(str, PIXELS):
        return None
    return ModelCase(name, "backbone", PIXELS[int(pixels)], (SOFTMAX, model.mechanism), size, int(pixels), depth=0)


def select(names: tuple[str, ...]) -> list[ModelCase]:
    """Those cases in the order of the table, then backbones as they are named; none: the table.

    ``backbones`` stands for the smallest of every family at every size, ``backbones-224`` for them at one; ``presets``
    for all models that have a name.
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
    """By name: cases that give the same are one model on softmax, for which stages are linear makes no difference."""
    return case.replace(f"{ALL_LINEAR}-", "-")


def variant(name: str) -> tuple[str, dict[str, Any]]:
    """Mechanism and its options."""
    return VARIANTS.get(name, (name, {}))
