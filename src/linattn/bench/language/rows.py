"""Rows of a measure, and the result that collects them: kept over runs, written as one JSON object."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

from linattn.bench.fit import crossover

Status = Literal["ok", "WRONG", "out of memory", "absent", "left out", "failed"]
BAD = ("WRONG", "failed")
UNFINISHED = ("left out", "failed")  # these get another chance in the next run
NOT_MEASURED = ("out of memory", "left out", "failed")


@dataclass
class LanguageRow(ABC):
    """One mechanism in one setting; heirs say which numbers of theirs are its key."""

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
    explain: dict[str, int] = field(default_factory=dict)  # what each call of attention takes, and how many say so
    run: int = 0  # which of meta's runs measured it

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]: ...

    def __str__(self) -> str:
        return ", ".join(map(str, self.key))

    def wrong(self) -> None:
        """Say so, by the numbers of the check."""
        self.status = "WRONG"
        self.reason = f"{self.worst_tensor} is off by {self.error:.1e}, allowed {self.budget:.1e}"


Row = TypeVar("Row", bound=LanguageRow)


@dataclass
class LanguageResult(Generic[Row]):
    """All of one run, or of several that took up one another."""

    meta: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    @property
    def right(self) -> bool:
        return not any(row.status in BAD for row in self.rows)

    @property
    def run(self) -> int:
        """The number of the run that is open."""
        return len(self.meta.get("runs", [])) - 1

    def find(self, key: tuple[Any, ...]) -> Row | None:
        return next((row for row in self.rows if row.key == key), None)

    def put(self, row: Row) -> None:
        """In the place of the row of the same thing, if there is one."""
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
        """What the rows say together; written beside them."""
        return {}

    def as_json(self) -> dict[str, Any]:
        meta = {**self.meta, "interrupted": self.interrupted}
        return {"meta": meta, "rows": [asdict(row) for row in self.rows], **self.derived()}

    def take_up(self, value: dict[str, Any], row_type: type[Row]) -> None:
        """The rows and the runs of an earlier file."""
        known = {f.name for f in fields(row_type)}
        self.rows = [row_type(**{k: v for k, v in row.items() if k in known}) for row in value["rows"]]
        self.meta["runs"] = value["meta"]["runs"]


@dataclass(frozen=True)
class Crossover:
    """Where a mechanism becomes faster than softmax. ``length``: None if it never does in what was measured."""

    mechanism: str
    setting: str
    length: float | None
    longest: int  # the longest length that both have
    gain: float  # softmax's time over the mechanism's there

    def __str__(self) -> str:
        at = f"{self.gain:.3g}x at {self.longest:,}"
        if self.length is None:
            return f"{self.mechanism}, {self.setting}: not faster than softmax up to {self.longest:,} ({at})"
        return f"{self.mechanism}, {self.setting}: faster than softmax from {self.length:,.0f} tokens on ({at})"


def find_crossover(
    mechanism: str, setting: str, softmax: Mapping[int, float], own: Mapping[int, float]
) -> Crossover | None:
    """From times by length; None where they have no length in common."""
    both = sorted(softmax.keys() & own.keys())
    if not both:
        return None
    last = both[-1]
    return Crossover(mechanism, setting, crossover(softmax, own), last, softmax[last] / own[last])
