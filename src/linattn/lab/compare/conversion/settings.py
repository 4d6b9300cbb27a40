"""The config of a comparison of conversions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from linattn.lab.train.config import TrainConfig
from linattn.lab.train.energy import check_energy
from linattn.lab.train.mechanism_options import check_compared, own_options
from linattn.layers.attention_options import LAYER_SETS
from linattn.mechanisms.registry import list_mechanisms, mechanism_info, mechanism_options
from linattn.support.checks import check_number
from linattn.support.options import OptionError, check_option

SIZES = ("tiny", "small", "base")  # of DeiT
# Options with which a mechanism starts as close to the softmax model as its formula allows.
START_OPTIONS: dict[str, dict[str, Any]] = {"mirror": {"reflections": 2}}


def with_start_options(
    mechanisms: Sequence[str], given: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """``START_OPTIONS`` of the compared mechanisms, updated by the options given for them.

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
    """One softmax model for each seed, converted to each mechanism and trained further for a share of its epochs."""

    data: str = "digits"
    mechanisms: tuple[str, ...] = ("softmax", "relu", "nala", "mirror")
    """Softmax is the reference: the same model, trained further for as long as the others."""
    size: str = "tiny"
    patch_size: int = 4
    depth: int | None = None
    """Number of blocks; None: 12, as in every size."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How the softmax model is trained."""
    share: float = 0.1
    """Epochs after the conversion, as a share of those before it."""
    seeds: int = 3
    lrs: tuple[float, ...] = ()
    """Learning rates after the conversion; of several, each mechanism takes the best on held-out training images, which
    its softmax model has not seen either. Empty: that of ``train``."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: START_OPTIONS)
    """Options of mechanisms, by name."""
    image_size: int | None = None
    output: Path = Path("runs/conversion")
    jobs: int = 1
    """Runs at a time, in separate processes: first the softmax models, then their conversions."""

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
        """Check options; those of the conversion itself are not options of a mechanism."""
        known = [option for option in mechanism_options(mechanism_info(name).cls) if option not in LAYER_SETS]
        for option in self.options.get(name, {}):
            if option not in known:
                takes = ", ".join(known) or "none"
                raise OptionError("option", f"mechanism {name!r} has no option {option!r}; it takes {takes}")

    def source(self, seed: int) -> TrainConfig:
        """How the softmax model of a seed is trained."""
        return replace(self.train, seed=seed)

    def finetuning(self, seed: int, lr: float) -> TrainConfig:
        """How a converted model is trained further: by the same recipe, with a share of its epochs and warm-up."""
        epochs = max(1, round(self.share * self.train.epochs))
        warmup = min(self.share * self.train.warmup_epochs, epochs)
        min_lr = min(self.train.min_lr, lr)
        return replace(self.train, seed=seed, lr=lr, min_lr=min_lr, epochs=epochs, warmup_epochs=warmup)

    def fingerprint(self) -> dict[str, Any]:
        """What all runs of a folder must have in common; mechanisms and seeds may be added to a folder later."""
        train = {name: value for name, value in self.train.fingerprint().items() if name != "seed"}
        return {
            **train, "data": self.data, "image_size": self.image_size, "size": self.size, "depth": self.depth,
            "patch_size": self.patch_size, "share": self.share, "finetune_lr": sorted(set(self.lrs)),
            "options": {name: dict(own) for name, own in sorted(self.options.items())},
        }  # fmt: skip
