"""Which models are timed: a vision transformer at two sizes of images, a language model at two batches."""

from dataclasses import dataclass, replace
from typing import Any

from linattn.support.options import check_option

SOFTMAX = "softmax"
# Names of the tables -> mechanism and its options, where the name alone does not tell.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"gated-head": ("gated", {"gate": "head"})}


@dataclass(frozen=True)
class ModelCase:
    """One model at one batch. Vision: a ``size`` of ``create_vit``, and pixels; language: tokens, and the decoder."""

    name: str
    kind: str  # vision, language
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
        return f"decoder, {self.depth} layers of {self.width}, {self.batch} x {self.tokens} tokens"

    @property
    def unit(self) -> str:
        return "images" if self.kind == "vision" else "tokens"

    @property
    def units(self) -> int:
        """Of one step."""
        return self.batch * (1 if self.kind == "vision" else self.tokens)

    def quick(self) -> "ModelCase":
        """Small enough for any machine; what runs is the same."""
        if self.kind == "vision":
            return replace(self, batch=2, size="digits", pixels=8)
        return replace(self, batch=2, tokens=24, depth=2, width=32, heads=2, hidden=48, vocabulary=64)


VISION = (SOFTMAX, "relu", "nala", "pola", "mirror")
LANGUAGE = (SOFTMAX, "gated-head", "retention", "gated")
CASES = (
    ModelCase("vit-224", "vision", 256, VISION, pixels=224),
    ModelCase("vit-512", "vision", 64, VISION, pixels=512),
    ModelCase("language-8192-b1", "language", 1, LANGUAGE, tokens=8192),
    ModelCase("language-8192-b4", "language", 4, LANGUAGE, tokens=8192),
)


def select(names: tuple[str, ...]) -> list[ModelCase]:
    """Those cases in the order of the table; none: all."""
    for name in names:
        check_option("cases", name, [case.name for case in CASES])
    return [case for case in CASES if not names or case.name in names]


def variant(name: str) -> tuple[str, dict[str, Any]]:
    """Mechanism and its options."""
    return VARIANTS.get(name, (name, {}))
