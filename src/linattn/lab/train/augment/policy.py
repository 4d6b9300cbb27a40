"""Settings of RandAugment: parsed from text, and turned into the parameters of operations."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.support.options import OptionError

ALLOWED = (
    "m (magnitude 0..10), n (operations an image), p (probability of each), mstd (spread of the magnitude, above 100: "
    "uniform), mmax (greatest magnitude), inc (0 or 1: stronger with the magnitude), joined by dashes, as in "
    "m9-n2-mstd0.5-inc1"
)
WHOLE = ("m", "n", "mmax", "inc")


@dataclass(frozen=True)
class Policy:
    """Settings in the notation of timm, such as ``rand-m9-n2-mstd0.5-inc1``, with timm's defaults.

    Example:
        >>> Policy.parse("m9-mstd0.5-inc1")
        Policy(magnitude=9, operations=2, probability=0.5, spread=0.5, greatest=10, increasing=True)
    """

    magnitude: int = 10
    operations: int = 2
    probability: float = 0.5
    spread: float = 0.0
    greatest: int = 10
    increasing: bool = False

    @staticmethod
    def parse(text: str) -> "Policy":
        """Parse settings; the ``rand-`` at the beginning, as timm has it, is optional."""
        settings: dict[str, float] = {}
        for part in text.removeprefix("rand-").split("-"):
            match = re.fullmatch(r"(mstd|mmax|inc|m|n|p)(\d+(?:\.\d+)?)", part)
            if match is None or match[1] in settings or (match[1] in WHOLE and "." in match[2]):
                raise OptionError("rand_augment", f"cannot read {part!r} in {text!r}; allowed once each: {ALLOWED}")
            settings[match[1]] = float(match[2])
        policy = Policy(
            magnitude=int(settings.get("m", 10)),
            operations=int(settings.get("n", 2)),
            probability=settings.get("p", 0.5),
            spread=settings.get("mstd", 0.0),
            greatest=int(settings.get("mmax", 10)),
            increasing=bool(settings.get("inc", 0)),
        )
        wrong = {
            f"m must be at most {policy.greatest} (mmax)": policy.magnitude > policy.greatest,
            "n must be at least 1": policy.operations < 1,
            "p must be at most 1": policy.probability > 1,
            "mmax must be at least 1": policy.greatest < 1,
            "inc must be 0 or 1": settings.get("inc", 0) > 1,
        }
        for rule, broken in wrong.items():
            if broken:
                raise OptionError("rand_augment", f"{rule}, got {text!r}")
        return policy

    def levels(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw strengths ``(count,)``, fp64; magnitude 10 is a strength of 1."""
        uniform = self.spread > 100
        draw = torch.rand if uniform else torch.randn
        noise = draw(count, generator=generator, dtype=torch.float64)
        magnitude = self.magnitude * noise if uniform else self.magnitude + self.spread * noise
        return magnitude.clamp(0, self.greatest) / 10

    def argument(self, operation: str, level: Tensor, sign: Tensor) -> Tensor:
        """The parameter of ``operation`` at strength ``level (b,)``, fp64; ``sign (b,)``: the direction, if any."""
        match operation:
            case "rotate":  # degrees
                return 30 * level * sign
            case "shear_x" | "shear_y":
                return 0.3 * level * sign
            case "translate_x" | "translate_y":  # share of the image
                return 0.45 * level * sign
            case "posterize":  # bits that stay
                bits = (4 * level).floor()
                return (4 - bits).clamp_min(0) if self.increasing else bits
            case "solarize":  # threshold
                threshold = (256 * level).floor().clamp_max(256)
                return 256 - threshold if self.increasing else threshold
            case "solarize_add":
                return (110 * level).floor().clamp_max(128)
            case "color" | "contrast" | "brightness" | "sharpness":  # 1 changes nothing
                return (1 + 0.9 * level * sign).clamp_min(0.1) if self.increasing else 0.1 + 1.8 * level
            case _:
                raise ValueError(f"{operation} has no parameter")
