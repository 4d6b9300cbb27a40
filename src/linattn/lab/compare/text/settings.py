"""The config of a comparison on a sequence task."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from linattn.lab.tasks.text import text_task
from linattn.lab.tasks.text.task import PLACES
from linattn.lab.train.mechanism_options import check_compared
from linattn.lab.train.text.config import AS_EVER, TextConfig
from linattn.lab.train.text.hosts import HostOptions
from linattn.lab.train.text.recipes import usual_settings
from linattn.mechanisms.registry import list_mechanisms
from linattn.support.options import OptionError, check_option

# Options of a single run -> the option of a comparison with several values.
OF_MANY = {"mechanism": "mechanisms", "hybrid": "mechanisms", "width": "widths"}


@contextmanager
def options_of_many(contender: str) -> Iterator[None]:
    """Turn an error in an option of one contender into one of the option for all contenders."""
    try:
        yield
    except OptionError as error:
        option = OF_MANY.get(error.option, error.option)
        raise OptionError(option, f"{contender}: {error.message}") from error


@dataclass(frozen=True)
class Contender:
    """A mechanism or pattern of mechanisms, with or without Canon layers, in a host of one width."""

    pattern: str
    canon: str | None
    width: int | None

    @property
    def series(self) -> str:
        """The name of the contender without its width."""
        return self.pattern if self.canon is None else f"{self.pattern}+{self.canon}"

    @property
    def name(self) -> str:
        return self.series if self.width is None else f"{self.series} {self.width}"


@dataclass(frozen=True)
class TextCompareConfig:
    """Mechanisms, with and without Canon layers, in hosts of one or more widths, on one task with one budget."""

    task: str = "mqar"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the task."""
    patterns: tuple[str, ...] = ("softmax", "elu", "gated", "mlstm", "zeros")
    canons: tuple[str | None, ...] = (None,)
    widths: tuple[int | None, ...] = (None,)
    host: HostOptions = field(default_factory=HostOptions)
    """The host of all runs; mechanism, Canon layers and width are replaced by those above."""
    equal_parameters: bool = False
    """Choose the width of feed-forward parts so that all models have about as many parameters as the first."""
    train: TextConfig = field(default_factory=TextConfig)
    """How every run is trained; seed and learning rate are replaced by those below."""
    seeds: int = 2
    lrs: tuple[float, ...] = ()
    """Learning rates; of several, each mechanism takes the best on held-out data. Empty: that of ``train``."""
    output: Path = Path("runs/compare")
    jobs: int = 1
    """Runs at a time; if more than one, each is trained in a separate process with one thread."""
    keep_weights: bool = True
    """Keep the weights of every run; False: only results and logs, which is all that a comparison reads."""

    @cached_property
    def contenders(self) -> dict[str, Contender]:
        """The contenders by name: those with and without Canon side by side, width after width."""
        found = [Contender(p, c, w) for w in self.widths for p in self.patterns for c in self.canons]
        return {contender.name: contender for contender in found}

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return tuple(self.contenders)

    def host_of(self, name: str) -> HostOptions:
        """The host of a contender, before numbers of parameters are made equal."""
        contender = self.contenders[name]
        found = replace(self.host, mechanism=contender.pattern, canon=contender.canon, width=contender.width)
        with options_of_many(name):
            names = found.names
        own = {key: value for key, value in self.host.options.items() if key in ("", *names)}
        return replace(found, options=own)

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        if not self.patterns:
            raise OptionError("mechanisms", f"name at least one of {', '.join(list_mechanisms())}")
        for option, values in (("mechanisms", self.patterns), ("canon", self.canons), ("widths", self.widths)):
            if len(set(values)) < len(values):
                raise OptionError(option, f"each may be named once, got {', '.join(map(str, values))}")
        for option in ("seeds", "jobs"):
            if getattr(self, option) < 1:
                raise OptionError(option, f"must be an integer >= 1, got {getattr(self, option)}")
        if any(not lr > 0 for lr in self.lrs):
            raise OptionError("lr", f"must be greater than 0, got {', '.join(map(str, self.lrs))}")
        for name in self.contenders:
            for mechanism in self.host_of(name).names:
                check_option("mechanisms", mechanism, list_mechanisms())
        used = {mechanism for name in self.contenders for mechanism in self.host_of(name).names}
        check_compared(self.host.options, used)
        self.train.check()

    def fingerprint(self) -> dict[str, Any]:
        """What all runs of a folder must have in common; mechanisms, widths and seeds may be added later."""
        # None for default values, as settings of folders from before these fields do not have them.
        train = dict.fromkeys(AS_EVER) | self.train.fingerprint()
        train = {name: value for name, value in train.items() if name not in ("seed", "lr")}
        sweep = sorted(set(self.lrs)) if self.lrs else [self.train.lr]
        left_out = ("mechanism", "canon", "width", "options")
        host = {name: value for name, value in asdict(self.host).items() if name not in left_out}
        given = {name: value for name, value in sorted(self.settings.items()) if name not in PLACES}
        # None may turn off a setting of the recipe. If it is the task's default too, older folders do not name it.
        usual = usual_settings(self.task)
        settings = {n: str(value) for n, value in given.items() if value is not None or usual.get(n) is not None}
        return {
            "task": self.task,
            "settings": settings,
            "content": text_task(self.task, **self.settings).content,
            "lr": sweep,
            "equal_parameters": self.equal_parameters and self.mechanisms[0],
            **host,
            **train,
        }
