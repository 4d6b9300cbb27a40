"""Rows of a benchmark, and the result that collects them over runs and is written as one JSON object."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

from linattn.lab.bench.fit import crossover

Status = Literal["ok", "WRONG", "out of memory", "absent", "left out", "failed"]
BAD = ("WRONG", "failed")
UNFINISHED = ("left out", "failed")  # rows that are tried again in the next run
NOT_MEASURED = ("out of memory", "left out", "failed")


@dataclass
class LanguageRow(ABC):
    """One mechanism in one setting; subclasses name the fields that form the key."""

    mechanism: str
    status: Status = "ok"
    reason: str = ""  # why there are no numbers, or what is wrong
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    repeats: int | None = None
    tokens_per_second: float | None = None
    error: float | None = None
    budget: float | None = None
    worst_tensor: str = ""
    checked_against: str = ""
    explain: dict[str, int] = field(default_factory=dict)  # form of each call of attention -> number of such calls
    run: int = 0  # number of the run in ``meta`` that measured it

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]: ...

    def __str__(self) -> str:
        return ", ".join(map(str, self.key))

    def wrong(self) -> None:
        """Mark the row as wrong, with the numbers of the check."""
        self.status = "WRONG"
        self.reason = f"{self.worst_tensor} is off by {self.error:.1e}, allowed {self.budget:.1e}"


Row = TypeVar("Row", bound=LanguageRow)


@dataclass
class LanguageResult(Generic[Row]):
    """All results of one run, or of several that resumed each other."""

    meta: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    @property
    def right(self) -> bool:
        return not any(row.status in BAD for row in self.rows)

    @property
    def run(self) -> int:
        """Number of the run that is open."""
        return len(self.meta.get("runs", [])) - 1

    def find(self, key: tuple[Any, ...]) -> Row | None:
        return next((row for row in self.rows if row.key == key), None)

    def put(self, row: Row) -> None:
        """Add a row, in place of an earlier row for the same measurement."""
        old = self.find(row.key)
        if old is None:
            self.rows.append(row)
        else:
            self.rows[self.rows.index(old)] = row

    def finished(self, key: tuple[Any, ...]) -> bool:
        row = self.find(key)
        return row is not None and (row.status not in UNFINISHED or row.run == self.run)

    def mechanisms(self) -> list[str]:
        return list(dict.fromkeys(row.mechanism for row in self.rows))

    def derived(self) -> dict[str, Any]:
        """What is derived from the rows; it is written beside them."""
        return {}

    def as_json(self) -> dict[str, Any]:
        meta = {**self.meta, "interrupted": self.interrupted}
        return {"meta": meta, "rows": [asdict(row) for row in self.rows], **self.derived()}

    def take_up(self, value: dict[str, Any], row_type: type[Row]) -> None:
        """Take over the rows and runs of an earlier file."""
        known = {f.name for f in fields(row_type)}
        self.rows = [row_type(**{k: v for k, v in row.items() if k in known}) for row in value["rows"]]
        self.meta["runs"] = value["meta"]["runs"]


@dataclass(frozen=True)
class Crossover:
    """Where a mechanism becomes faster than softmax; ``length`` is None if it never does at the measured lengths."""

    mechanism: str
    setting: str
    length: float | None
    longest: int  # the longest length that both have
    gain: float  # softmax's time over the mechanism's at that length

    def __str__(self) -> str:
        at = f"{self.gain:.3g}x at {self.longest:,}"
        if self.length is None:
            return f"{self.mechanism}, {self.setting}: not faster than softmax up to {self.longest:,} ({at})"
        return f"{self.mechanism}, {self.setting}: faster than softmax from {self.length:,.0f} tokens on ({at})"


def find_crossover(
    mechanism: str, setting: str, softmax: Mapping[int, float], own: Mapping[int, float]
) -> Crossover | None:
    """Find the crossover from times by length; None if they have no length in common."""
    both = sorted(softmax.keys() & own.keys())
    if not both:
        return None
    last = both[-1]
    return Crossover(mechanism, setting, crossover(softmax, own), last, softmax[last] / own[last])
