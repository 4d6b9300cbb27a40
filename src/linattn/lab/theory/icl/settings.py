"""The settings of the laboratory, checked before any work is done."""

from dataclasses import dataclass
from typing import Any

from linattn.lab.theory.icl.case import FAMILIES
from linattn.mechanisms.registry import list_mechanisms
from linattn.support.options import OptionError, check_device, check_option

LINEAR, H3, GATED, CANON = "linear", "h3", "gated", "canon"
MODELS = (LINEAR, H3, GATED, CANON)  # besides these, any registered mechanism
EXACT = (LINEAR, H3)  # the formula is their optimum; for the others it is that of a restricted form
RANKED = ("low-rank", "low-rank-update")  # statements about linear attention
EVERYWHERE = ("independent", "drift")  # families on which all models are trained unless models are named


@dataclass(frozen=True)
class IclConfig:
    """One run. The defaults are the documented table of a GPU; ``QUICK`` changes them to those of a CPU."""

    families: tuple[str, ...] = tuple(FAMILIES)
    models: tuple[str, ...] = ()  # none: linear and h3 for all families, the others where they add something
    d: int = 20
    lengths: tuple[int, ...] = (5, 10, 20, 40, 60)
    seeds: int = 2
    steps: int = 2000
    batch: int = 512
    lr: float = 0.01
    tests: int = 1 << 18
    tolerance: float = 0.02
    device: str = "cuda"
    seed: int = 0

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        for family in self.families:
            check_option("families", family, FAMILIES)
        for model in self.models:
            check_option("models", model, (*MODELS, *list_mechanisms(causal=True)))
        if not self.families:
            raise OptionError("families", f"name at least one of {', '.join(FAMILIES)}")
        for option, least in (("d", 2), ("seeds", 1), ("steps", 1), ("batch", 2), ("tests", 2)):
            if getattr(self, option) < least:
                raise OptionError(option, f"must be an integer >= {least}, got {getattr(self, option)}")
        if not self.lengths or any(n < 1 for n in self.lengths):
            raise OptionError("lengths", f"must be integers >= 1, got {', '.join(map(str, self.lengths)) or 'none'}")
        if len(set(self.lengths)) < len(self.lengths):
            raise OptionError("lengths", f"must differ, got {', '.join(map(str, self.lengths))}")
        for option in ("lr", "tolerance"):
            if not getattr(self, option) > 0:
                raise OptionError(option, f"must be greater than 0, got {getattr(self, option)}")
        if not self.units:
            named = ", ".join(self.models)
            raise OptionError("models", f"{' and '.join(self.families)} are about {LINEAR} alone, got {named}")
        check_device(self.device)

    @property
    def units(self) -> list[tuple[str, str]]:
        """Pairs (family, model): each is one stack of models that are trained together."""
        return [(family, model) for family in self.families for model in self._models_of(family)]

    def _models_of(self, family: str) -> tuple[str, ...]:
        if family in RANKED:
            return (LINEAR,) if not self.models or LINEAR in self.models else ()
        return self.models or (MODELS if family in EVERYWHERE else EXACT)


# The whole experiment in minutes on two cores; fewer test tasks, so a wider tolerance.
QUICK: dict[str, Any] = {
    "d": 5,
    "lengths": (3, 6, 12),
    "seeds": 1,
    "steps": 400,
    "batch": 256,
    "lr": 0.03,
    "tests": 1 << 15,
    "tolerance": 0.05,
}
