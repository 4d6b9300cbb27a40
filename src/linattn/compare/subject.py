"""What is compared on what: mechanisms on images or sequences, models on graphs, behind one face."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from linattn.compare.cells import Cell, CellResult
from linattn.report.metric import Metric
from linattn.support.options import OptionError
from linattn.support.telling import OnWork, in_silence

OnStep = Callable[[Cell, int, int, float, float], None]
OnRecord = Callable[[Cell, float, int], None]


class Budget(Protocol):
    """What all configs of training have."""

    @property
    def lr(self) -> float: ...
    @property
    def compile(self) -> bool: ...


class Comparing(Protocol):
    """What the machinery asks of a comparison, whatever is compared on."""

    @property
    def mechanisms(self) -> tuple[str, ...]: ...
    @property
    def seeds(self) -> int: ...
    @property
    def lrs(self) -> tuple[float, ...]: ...
    @property
    def output(self) -> Path: ...
    @property
    def jobs(self) -> int: ...
    @property
    def train(self) -> Any: ...
    def check(self) -> None: ...
    def fingerprint(self) -> dict[str, Any]: ...


class Outcome(NamedTuple):
    """A finished run: its score, seconds of training, and one record an evaluation."""

    score: float
    seconds: float
    records: list[dict[str, Any]]
    more: dict[str, Any] | None = None
    """What else is known of it; numbers get a mean over seeds."""


class Trainer(ABC):
    """Trains runs one after the other; what was finished is never trained again."""

    on_work: OnWork = staticmethod(in_silence)
    """Told what goes on before the first step of a run."""

    def __init__(self, config: Comparing) -> None:
        self._compiles = config.train.compile
        self._last = ""  # mechanism

    def run(self, cell: Cell) -> CellResult:
        """Train one; a run that fails says why and leaves the others alone."""
        if self._compiles and cell.mechanism != self._last:
            torch._dynamo.reset()  # else every call would first be held against the code of all mechanisms before
        self._last = cell.mechanism
        try:
            found = self.train(cell)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, OptionError):
                raise  # wrong for all of them, and the user's to mend
            return CellResult(cell, "failed", reason=" ".join(str(error).split())[:300])
        return CellResult(cell, "done", "", found.score, found.seconds, found.records, found.more)

    @abstractmethod
    def train(self, cell: Cell) -> Outcome: ...


class Subject(ABC):
    """The data of a comparison, with all that must be known of it."""

    metric = Metric()
    rounds: int
    """Evaluations of a run."""
    has_report = True
    """Whether charts and a page are drawn of it, and mechanisms are ranked in words."""
    sweep_is_final = False
    """Whether runs that choose learning rates train on all that final runs do: one of each is then final as well."""

    @abstractmethod
    def check(self) -> None:
        """Raise for a mechanism that does not fit, before any of them is trained."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The ``meta`` of the results."""

    @abstractmethod
    def announce(self, meta: dict[str, Any]) -> str:
        """Data, host and budget in a few words."""

    @abstractmethod
    def trainer(self, on_step: OnStep, on_record: OnRecord) -> Trainer: ...

    def prepare(self, on_work: OnWork) -> None:  # noqa: B027
        """Make what all processes share, before they start."""

    def adopt(self, cell: Cell) -> bool:
        """Whether a final run was trained while learning rates were chosen; if so, its folder now has it finished."""
        return False

    def known_costs(self, on_work: OnWork) -> dict[str, dict[str, Any]]:
        """What is known of each before it is trained, by name: an interrupted comparison has it too."""
        return {}

    @abstractmethod
    def costs(self, mechanisms: list[str], on_work: OnWork) -> dict[str, dict[str, Any]]:
        """What each costs, by name."""

    def attention(self, cells: list[Cell], on_work: OnWork) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
        """What attention does after training, by name, and examples to be drawn; nothing where it is not looked at."""
        return {}, None

    def recipe_lr(self, mechanism: str) -> float | None:
        """The learning rate where none was named; None: that of the config, for all."""
        return None

    def details(self, mechanism: str) -> dict[str, Any]:
        """What the results say about a mechanism besides what was measured."""
        return {}

    @abstractmethod
    def step_words(self, epoch: int, step: int) -> str:
        """Where a run stands."""
