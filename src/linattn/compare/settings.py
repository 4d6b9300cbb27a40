"""What a comparison is: every choice, checked before any work is done."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from linattn.layers.local import KERNELS
from linattn.layers.presets import list_presets
from linattn.mechanisms.registry import list_mechanisms
from linattn.models.vision.sizes import SIZES
from linattn.models.vision.vit import POOLS
from linattn.support.options import OptionError, check_option
from linattn.train.config import TrainConfig

REFERENCE = "softmax"  # what entropies are compared with


@dataclass(frozen=True)
class HostConfig:
    """The host that every mechanism is put into. None: as ``size`` has it."""

    size: str = "digits"
    patch_size: int | None = None
    depth: int | None = None
    global_pool: str = "avg"
    preset: str | None = None
    """The parts of a paper's block, around every mechanism alike."""
    local: str | None = None
    """A depthwise convolution of the values beside every mechanism alike."""

    def check(self) -> None:
        check_option("size", self.size, SIZES)
        check_option("global_pool", self.global_pool, POOLS)
        check_option("preset", self.preset, [None, *list_presets()])
        check_option("local", self.local, [None, *KERNELS])
        for option in ("patch_size", "depth"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise OptionError(option, f"must be an integer >= 1, got {value}")


@dataclass(frozen=True)
class CompareConfig:
    """Mechanisms, one host, one data set, one budget."""

    data: str = "digits"
    mechanisms: tuple[str, ...] = ("softmax", "relu", "pola", "nala", "mirror")
    host: HostConfig = field(default_factory=HostConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    """Of every run; its seed and learning rate are replaced by those below."""
    seeds: int = 2
    lrs: tuple[float, ...] = ()
    """Several: each mechanism takes the one that is best on held-out training images. None: that of ``train``."""
    image_size: int | None = None
    output: Path = Path("runs/compare")
    jobs: int = 1
    """Runs at a time; more than one trains each in a process of its own with one thread."""

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        if not self.mechanisms:
            raise OptionError("mechanisms", f"name at least one of {', '.join(list_mechanisms(bidirectional=True))}")
        for name in self.mechanisms:
            check_option("mechanisms", name, list_mechanisms(bidirectional=True))
        if len(set(self.mechanisms)) < len(self.mechanisms):
            raise OptionError("mechanisms", f"each may be named once, got {', '.join(self.mechanisms)}")
        if self.seeds < 1:
            raise OptionError("seeds", f"must be an integer >= 1, got {self.seeds}")
        if self.jobs < 1:
            raise OptionError("jobs", f"must be an integer >= 1, got {self.jobs}")
        if any(not lr > 0 for lr in self.lrs):
            raise OptionError("lr", f"must be greater than 0, got {', '.join(map(str, self.lrs))}")
        self.host.check()
        self.train.check()

    def fingerprint(self) -> dict[str, Any]:
        """What all runs of a folder have in common; mechanisms and seeds may be added to a folder later."""
        train = {name: value for name, value in self.train.fingerprint().items() if name not in ("seed", "lr")}
        sweep = sorted(set(self.lrs)) if self.lrs else [self.train.lr]
        return {"data": self.data, "image_size": self.image_size, "lr": sweep, **asdict(self.host), **train}
