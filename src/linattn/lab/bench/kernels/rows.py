"""Rows of a race of kernels, and which goals they reach."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from linattn.lab.bench.kernels.cases import CASES, FLOOR, MOST_COLD_SECONDS, MOST_EXTRA, OURS, Case, Goal
from linattn.lab.bench.kernels.clock import LONG_CALLS
from linattn.lab.bench.passes import FORWARD, TRAINING

Status = Literal["ok", "WRONG", "absent", "left out", "failed"]
KERNELS = {case.name: case for case in CASES}


@dataclass
class KernelRow:
    """One contender in one case and pass. Times are ms of one call, errors relative to max(abs(exact))."""

    case: str
    contender: str
    pass_name: str
    status: Status = "ok"
    reason: str = ""  # why there are no numbers, or what is wrong
    note: str = ""
    shape: str = ""
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    floor_ms: float | None = None
    over_floor: float | None = None
    extra_bytes: int | None = None  # beyond inputs, outputs and gradients
    extra_over_qkvo: float | None = None
    first_seconds: float | None = None  # the first call of this run, mostly from warm caches
    timed_by: str = ""  # "CUDA graph", "calls" or "long calls"
    called_ms: float | None = None  # as called from Python
    error: float | None = None
    budget: float | None = None
    worst_tensor: str = ""
    checked_against: str = ""
    error_at_full_size: float | None = None
    run: int = 0  # number of the run in ``meta`` that measured it


@dataclass(frozen=True)
class ColdStart:
    """Seconds of the first forward and backward of ``linattn triton`` in a fresh process with empty caches."""

    case: str
    seconds: float | None
    reason: str = ""  # why there is no number


@dataclass(frozen=True)
class Outcome:
    """A goal and its outcome: ``factor = value / limit``, reached if at most 1."""

    case: str
    what: str
    goal: str
    value: float | None
    limit: float
    reached: bool | None  # None: not measured
    reason: str = ""

    @property
    def factor(self) -> float | None:
        return None if self.value is None else self.value / self.limit


@dataclass
class KernelsResult:
    """All results of one run, or of several that resumed each other, as they are written to the JSON file."""

    meta: dict[str, Any]
    rows: list[KernelRow] = field(default_factory=list)
    interrupted: bool = False
    cold: list[ColdStart] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing of this library was wrong or failed; failures of rivals are results."""
        ours = (row for row in self.rows if row.contender.startswith("linattn"))
        return not any(row.status in ("WRONG", "failed") for row in ours)

    def find(self, case: str, contender: str, pass_name: str) -> KernelRow | None:
        wanted = (case, contender, pass_name)
        return next((row for row in self.rows if (row.case, row.contender, row.pass_name) == wanted), None)

    def case_names(self) -> list[str]:
        return list(dict.fromkeys(row.case for row in self.rows))

    def put(self, row: KernelRow) -> None:
        """Add a row, in place of an earlier row for the same measurement."""
        old = self.find(row.case, row.contender, row.pass_name)
        if old is None:
            self.rows.append(row)
        else:
            self.rows[self.rows.index(old)] = row

    def outcomes(self) -> list[Outcome]:
        """Outcomes of all goals of the cases that have rows; reduced shapes have no goals."""
        found: list[Outcome] = []
        if self.meta["settings"]["quick"]:
            return found
        for name in self.case_names():
            case = KERNELS.get(name)
            if case is None:
                continue
            for pass_name, goals in ((FORWARD, case.forward), (TRAINING, case.training)):
                found += [self._time_outcome(case, pass_name, goal) for goal in goals]
            found += self._memory_outcomes(name)
        goal, limit = f"<= {MOST_COLD_SECONDS:g} s", MOST_COLD_SECONDS
        for start in self.cold:
            reached = None if start.seconds is None else start.seconds <= limit
            found.append(Outcome(start.case, "cold start", goal, start.seconds, limit, reached, start.reason))
        return found

    def _time_outcome(self, case: Case, pass_name: str, goal: Goal) -> Outcome:
        own = self.find(case.name, OURS, pass_name)
        if own is None or own.median_ms is None or own.status != "ok":
            reason = "not measured" if own is None else f"{own.status}: {own.reason}"
            return Outcome(case.name, pass_name, str(goal), None, goal.limit, None, reason)
        mine = own.median_ms
        if goal.against == FLOOR:
            other, reason = own.floor_ms, ""
        else:
            row = self.find(goal.case or case.name, goal.against, pass_name)
            other = None if row is None else row.median_ms
            reason = "" if row is None else _reservation(own, row)
            if row is not None and not _timed_alike(own, row) and own.called_ms and row.called_ms:
                mine, other = own.called_ms, row.called_ms  # both times in the same way, or neither
        if not other:
            reason = reason or f"{goal.against} was not measured"
            return Outcome(case.name, pass_name, str(goal), None, goal.limit, None, reason)
        value = mine / other
        return Outcome(case.name, pass_name, str(goal), value, goal.limit, value <= goal.limit, reason)

    def _memory_outcomes(self, case: str) -> list[Outcome]:
        found = []
        rows = [self.find(case, OURS, pass_name) for pass_name in (FORWARD, TRAINING)]
        for row in rows:
            if row is None or row.status != "ok":
                continue
            limit, value = MOST_EXTRA[row.pass_name], row.extra_over_qkvo
            if value is not None:
                goal = f"<= {limit:.0%} of q, k, v, o"
                found.append(Outcome(case, f"memory, {row.pass_name}", goal, value, limit, value <= limit))
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "meta": {**self.meta, "interrupted": self.interrupted},
            "rows": [asdict(row) for row in self.rows],
            "goals": [{**asdict(o), "factor": o.factor} for o in self.outcomes()],
            "cold": [asdict(start) for start in self.cold],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "KernelsResult":
        known = {f.name for f in fields(KernelRow)}
        rows = [KernelRow(**{k: v for k, v in row.items() if k in known}) for row in value["rows"]]
        return cls(value["meta"], rows, cold=[ColdStart(**start) for start in value.get("cold", [])])


def _timed_alike(a: KernelRow, b: KernelRow) -> bool:
    """Whether two rows were timed in comparable ways; the host's work does not matter in long calls."""
    return a.timed_by == b.timed_by or LONG_CALLS in (a.timed_by, b.timed_by)


def _reservation(own: KernelRow, other: KernelRow) -> str:
    """What a reader must know about a comparison of the two rows."""
    said = []
    if other.status != "ok":
        said.append(f"{other.contender}: {other.status} {other.reason}".strip())
    if other.median_ms is not None and not _timed_alike(own, other):
        said.append(f"{other.contender} cannot be captured: both timed as Python calls them")
    if other.run != own.run:
        said.append(f"{other.contender} was measured in another run")
    return "; ".join(said)
