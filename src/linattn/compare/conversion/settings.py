"""A comparison of conversions: every choice, checked before any work is done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from linattn.layers.attention_options import LAYER_SETS
from linattn.mechanisms.registry import list_mechanisms, mechanism_info, mechanism_options
from linattn.support.options import OptionError, check_option
from linattn.train.checks import check_number
from linattn.train.config import TrainConfig
from linattn.train.energy import check_energy
from linattn.train.mechanism_options import check_compared, own_options

SIZES = ("tiny", "small", "base")  # of DeiT
# What lets a mechanism start where softmax left the model, as closely as its math allows.
START_OPTIONS: dict[str, dict[str, Any]] = {"mirror": {"reflections": 2}}


def with_start_options(
    mechanisms: Sequence[str], given: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """``START_OPTIONS`` with what else was given for the mechanisms that are compared.

    Example:
        >>> with_start_options(("mirror", "pola"), {"pola": {"alpha": 3.0}, "mirror": {"modulation": "none"}})
        {'mirror': {'reflections': 2, 'modulation': 'none'}, 'pola': {'alpha': 3.0}}
    """
    check_compared(given, mechanisms)
    found: dict[str, Mapping[str, Any]] = dict(START_OPTIONS)
    for name in mechanisms:
        if own := own_options(name, given):
            found[name] = {**START_OPTIONS.get(name, {}), **own}
    return found


@dataclass(frozen=True)
class ConversionConfig:
    """One softmax model a seed, converted to each mechanism and trained on with a share of its budget."""

    data: str = "digits"
    mechanisms: tuple[str, ...] = ("softmax", "relu", "nala", "mirror")
    """Softmax is the yardstick: the same model, trained on as long as the others."""
    size: str = "tiny"
    patch_size: int = 4
    depth: int | None = None
    """None: that of the size, 12."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Of the softmax model."""
    share: float = 0.1
    """Epochs after the conversion over those before it."""
    seeds: int = 3
    lrs: tuple[float, ...] = ()
    """After the conversion; several: each mechanism takes the one that is best on held-out training images, where the
    softmax model has not seen them either. None: that of ``train``."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: START_OPTIONS)
    """Of mechanisms, by name."""
    image_size: int | None = None
    output: Path = Path("runs/conversion")
    jobs: int = 1
    """Runs at a time, in processes of their own: first the softmax models, then what becomes of them."""

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        if not self.mechanisms:
            raise OptionError("mechanisms", f"name at least one of {', '.join(list_mechanisms(bidirectional=True))}")
        for name in self.mechanisms:
            check_option("mechanisms", name, list_mechanisms(bidirectional=True))
        if len(set(self.mechanisms)) < len(self.mechanisms):
            raise OptionError("mechanisms", f"each may be named once, got {', '.join(self.mechanisms)}")
        check_option("size", self.size, SIZES)
        for option in ("patch_size", "depth", "seeds", "jobs"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise OptionError(option, f"must be an integer >= 1, got {value}")
        check_number("share", self.share, above=0, most=1)
        if any(not lr > 0 for lr in self.lrs):
            raise OptionError("finetune_lr", f"must be greater than 0, got {', '.join(map(str, self.lrs))}")
        for name in self.mechanisms:
            self._check_options(name)
        self.train.check()
        check_energy(self.train.energy_loss, (mechanism_info(name).cls for name in self.mechanisms))

    def _check_options(self, name: str) -> None:
        """A conversion has options of its own, which are none of a mechanism's."""
        known = [option for option in mechanism_options(mechanism_info(name).cls) if option not in LAYER_SETS]
        for option in self.options.get(name, {}):
            if option not in known:
                takes = ", ".join(known) or "none"
                raise OptionError("option", f"mechanism {name!r} has no option {option!r}; it takes {takes}")

    def source(self, seed: int) -> TrainConfig:
        """How the softmax model is trained."""
        return replace(self.train, seed=seed)

    def finetuning(self, seed: int, lr: float) -> TrainConfig:
        """How a converted model is trained on: the same recipe, shorter, and its warm-up with it."""
        epochs = max(1, round(self.share * self.train.epochs))
        warmup = min(self.share * self.train.warmup_epochs, epochs)
        min_lr = min(self.train.min_lr, lr)
        return replace(self.train, seed=seed, lr=lr, min_lr=min_lr, epochs=epochs, warmup_epochs=warmup)

    def fingerprint(self) -> dict[str, Any]:
        """What all runs of a folder have in common; mechanisms and seeds may be added to a folder later."""
        train = {name: value for name, value in self.train.fingerprint().items() if name != "seed"}
        return {
            **train, "data": self.data, "image_size": self.image_size, "size": self.size, "depth": self.depth,
            "patch_size": self.patch_size, "share": self.share, "finetune_lr": sorted(set(self.lrs)),
            "options": {name: dict(own) for name, own in sorted(self.options.items())},
        }  # fmt: skip
