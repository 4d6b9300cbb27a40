"""The config of a comparison on images."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from linattn.lab.train.config import TrainConfig
from linattn.lab.train.energy import check_energy
from linattn.lab.train.mechanism_options import check_compared, own_options
from linattn.layers.attention_parts import KERNELS
from linattn.layers.presets import list_presets
from linattn.mechanisms.registry import list_mechanisms, mechanism_info
from linattn.models.vision.patches import STEM_STRIDES
from linattn.models.vision.pyramid import PYRAMID_SIZES
from linattn.models.vision.vit import POOLS, SIZES
from linattn.support.options import OptionError, check_option

REFERENCE = "softmax"  # the mechanism whose entropies are the reference
VIT, PYRAMID = "vit", "pyramid"
# Fields without meaning for a vision transformer; settings of folders from before pyramids do not have them.
OF_PYRAMIDS = ("family", "stages")


@dataclass(frozen=True)
class HostConfig:
    """The host for every mechanism. Fields of None are as in ``size``, or off if sizes do not set them."""

    size: str = "digits"
    """A name in ``SIZES``, or for a pyramid in ``PYRAMID_SIZES``."""
    patch_size: int | None = None
    """Pixels on a token's side; for a pyramid, in its first stage: 4, 2 or 1. None: for a pyramid 4, as published, or
    less if needed for a plane of at least 2 x 2 tokens in the last stage."""
    depth: int | None = None
    global_pool: str = "avg"
    preset: str | None = None
    """A preset with the parts of a paper's block, the same around every mechanism."""
    local: str | None = None
    """A depthwise convolution of the values, the same beside every mechanism."""
    family: str = VIT
    """``"vit"``, or ``"pyramid"``: the four stages of NaLaFormer and its relatives, with NaLaFormer's parts if
    ``preset`` is None."""
    stages: str = "llss"
    """Letters for the stages of a pyramid: l, the mechanism; s, softmax."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of mechanisms, by name; options under the empty name are for all mechanisms."""

    def check(self) -> None:
        check_option("host", self.family, (VIT, PYRAMID))
        check_option("size", self.size, SIZES if self.family == VIT else PYRAMID_SIZES)
        check_option("global_pool", self.global_pool, POOLS)
        if self.family == PYRAMID:
            self._check_pyramid()
        check_option("preset", self.preset, [None, *list_presets()])
        check_option("local", self.local, [None, *KERNELS])
        for option in ("patch_size", "depth"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise OptionError(option, f"must be an integer >= 1, got {value}")

    def _check_pyramid(self) -> None:
        if self.depth is not None:
            raise OptionError("depth", "is that of a vision transformer; a pyramid has the depths of its size")
        check_option("global_pool", self.global_pool, ("avg",))
        check_option("patch_size", self.patch_size, (None, *STEM_STRIDES))
        if len(self.stages) != 4 or set(self.stages) - set("ls"):
            raise OptionError("stages", f"must be four letters, l (mechanism) or s (softmax), got {self.stages!r}")

    def fingerprint(self) -> dict[str, Any]:
        left_out = ("options", *(OF_PYRAMIDS if self.family == VIT else ()))
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def options_by_name(self, mechanisms: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The options of those mechanisms that have some."""
        return {name: own for name in mechanisms if (own := own_options(name, self.options))}


@dataclass(frozen=True)
class CompareConfig:
    """Several mechanisms in one host, with one data set and one budget."""

    data: str = "digits"
    mechanisms: tuple[str, ...] = ("softmax", "relu", "pola", "nala", "mirror")
    host: HostConfig = field(default_factory=HostConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    """How every run is trained; seed and learning rate are replaced by those below."""
    seeds: int = 2
    lrs: tuple[float, ...] = ()
    """Learning rates; of several, each mechanism takes the best on held-out training images. Empty: as in ``train``."""
    image_size: int | None = None
    output: Path = Path("runs/compare")
    jobs: int = 1
    """Runs at a time; if more than one, each is trained in a separate process with one thread."""

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
        check_compared(self.host.options, self.mechanisms)
        self.train.check()
        check_energy(self.train.energy_loss, (mechanism_info(name).cls for name in self.mechanisms))

    def fingerprint(self) -> dict[str, Any]:
        """What all runs of a folder must have in common; mechanisms and seeds may be added to a folder later."""
        train = {name: value for name, value in self.train.fingerprint().items() if name not in ("seed", "lr")}
        sweep = sorted(set(self.lrs)) if self.lrs else [self.train.lr]
        # None if there are none, as in settings of folders from before there were options.
        options = self.host.options_by_name(self.mechanisms) or None
        return {
            "data": self.data,
            "image_size": self.image_size,
            "lr": sweep,
            "options": options,
            **self.host.fingerprint(),
            **train,
        }
