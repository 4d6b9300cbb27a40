"""The common interface of comparisons: of mechanisms on images or sequences, of models on graphs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from linattn.lab.compare.cells import Cell, CellResult
from linattn.lab.pages.metric import Metric
from linattn.support.options import OptionError
from linattn.support.telling import OnWork, in_silence

OnStep = Callable[[Cell, int, int, float, float], None]
OnRecord = Callable[[Cell, float, int], None]


class Budget(Protocol):
    """The fields that all training configs have."""

    @property
    def lr(self) -> float: ...
    @property
    def compile(self) -> bool: ...


class Comparing(Protocol):
    """The fields that every config of a comparison has."""

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
    """A finished run: its score, seconds of training, and one record for each evaluation."""

    score: float
    seconds: float
    records: list[dict[str, Any]]
    more: dict[str, Any] | None = None
    """Further results; numbers are averaged over seeds."""


class Trainer(ABC):
    """Trains runs one after the other; finished runs are never trained again."""

    on_work: OnWork = staticmethod(in_silence)
    """Called with a description of work before the first step of a run."""

    def __init__(self, config: Comparing) -> None:
        self._compiles = config.train.compile
        self._last = ""  # the mechanism of the last run

    def run(self, cell: Cell) -> CellResult:
        """Train a run; if it fails, the result says why, and other runs are not affected."""
        if self._compiles and cell.mechanism != self._last:
            torch._dynamo.reset()  # else every call would first be checked against the code of all earlier mechanisms
        self._last = cell.mechanism
        try:
            found = self.train(cell)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, OptionError):
                raise  # wrong for all runs, and for the user to correct
            return CellResult(cell, "failed", reason=" ".join(str(error).split())[:300])
        return CellResult(cell, "done", "", found.score, found.seconds, found.records, found.more)

    @abstractmethod
    def train(self, cell: Cell) -> Outcome: ...


class Subject(ABC):
    """What is compared, on which data: everything that differs between kinds of comparisons."""

    metric = Metric()
    rounds: int
    """Number of evaluations of a run."""
    has_report = True
    """Whether there are charts and a page, and a ranking of mechanisms in words."""
    sweep_is_final = False
    """Whether runs that choose learning rates train on the same data as final runs; the best can then serve as one."""

    @abstractmethod
    def check(self) -> None:
        """Raise if a mechanism does not fit, before any run is trained."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The ``meta`` of the results."""

    @abstractmethod
    def announce(self, meta: dict[str, Any]) -> str:
        """Data, host and budget in a few words."""

    @abstractmethod
    def trainer(self, on_step: OnStep, on_record: OnRecord) -> Trainer: ...

    def prepare(self, on_work: OnWork) -> None:  # noqa: B027
        """Make data that all processes share, before they start."""

    def adopt(self, cell: Cell) -> bool:
        """Whether a final run was already trained while choosing learning rates; if so, finish its folder."""
        return False

    def known_costs(self, on_work: OnWork) -> dict[str, dict[str, Any]]:
        """Costs of each mechanism that are known before training, so that an interrupted comparison has them too."""
        return {}

    @abstractmethod
    def costs(self, mechanisms: list[str], on_work: OnWork) -> dict[str, dict[str, Any]]:
        """Measured costs of each mechanism, by name."""

    def attention(self, cells: list[Cell], on_work: OnWork) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
        """Statistics of attention after training, by mechanism, and examples for drawing; by default none."""
        return {}, None

    def recipe_lr(self, mechanism: str) -> float | None:
        """The learning rate of a mechanism if none is given; None: that of the config."""
        return None

    def details(self, mechanism: str) -> dict[str, Any]:
        """What the results have about a mechanism besides measurements."""
        return {}

    @abstractmethod
    def step_words(self, epoch: int, step: int) -> str:
        """The progress of a run in words."""
