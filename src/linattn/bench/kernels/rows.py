"""Rows of a race of kernels, and which goals they reach."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from linattn.bench.kernels.cases import CASES, FLOOR, MOST_COLD_SECONDS, MOST_EXTRA, OURS, Case, Goal
from linattn.bench.passes import FORWARD, TRAINING

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
    cold_seconds: float | None = None  # the first call of this run
    error: float | None = None
    budget: float | None = None
    worst_tensor: str = ""
    checked_against: str = ""
    error_at_full_size: float | None = None
    run: int = 0  # which of meta's runs measured it


@dataclass(frozen=True)
class Outcome:
    """A goal and what became of it: ``factor = value / limit``, reached up to 1."""

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
    """All of one run, or of several that took up one another: what is written to the JSON file."""

    meta: dict[str, Any]
    rows: list[KernelRow] = field(default_factory=list)
    interrupted: bool = False

    @property
    def right(self) -> bool:
        """Nothing of this library was wrong or failed; what rivals do is a finding."""
        ours = (row for row in self.rows if row.contender.startswith("linattn"))
        return not any(row.status in ("WRONG", "failed") for row in ours)

    def find(self, case: str, contender: str, pass_name: str) -> KernelRow | None:
        wanted = (case, contender, pass_name)
        return next((row for row in self.rows if (row.case, row.contender, row.pass_name) == wanted), None)

    def case_names(self) -> list[str]:
        return list(dict.fromkeys(row.case for row in self.rows))

    def outcomes(self) -> list[Outcome]:
        """Every goal of the cases that have rows; shrunken shapes have none."""
        found: list[Outcome] = []
        if self.meta["settings"]["quick"]:
            return found
        for name in self.case_names():
            case = KERNELS.get(name)
            if case is None:
                continue
            for pass_name, goals in ((FORWARD, case.forward), (TRAINING, case.training)):
                found += [self._time_outcome(case, pass_name, goal) for goal in goals]
            found += self._other_outcomes(name)
        return found

    def _time_outcome(self, case: Case, pass_name: str, goal: Goal) -> Outcome:
        own = self.find(case.name, OURS, pass_name)
        if own is None or own.median_ms is None or own.status != "ok":
            reason = "not measured" if own is None else f"{own.status}: {own.reason}"
            return Outcome(case.name, pass_name, str(goal), None, goal.limit, None, reason)
        if goal.against == FLOOR:
            other, reason = own.floor_ms, ""
        else:
            row = self.find(goal.case or case.name, goal.against, pass_name)
            other = None if row is None else row.median_ms
            reason = "" if row is None or row.status == "ok" else f"{goal.against}: {row.status} {row.reason}".strip()
        if not other:
            reason = reason or f"{goal.against} was not measured"
            return Outcome(case.name, pass_name, str(goal), None, goal.limit, None, reason)
        value = own.median_ms / other
        return Outcome(case.name, pass_name, str(goal), value, goal.limit, value <= goal.limit, reason)

    def _other_outcomes(self, case: str) -> list[Outcome]:
        """Memory and the first call."""
        found = []
        rows = [self.find(case, OURS, pass_name) for pass_name in (FORWARD, TRAINING)]
        for row in rows:
            if row is None or row.status != "ok":
                continue
            limit, value = MOST_EXTRA[row.pass_name], row.extra_over_qkvo
            if value is not None:
                goal = f"<= {limit:.0%} of q, k, v, o"
                found.append(Outcome(case, f"memory, {row.pass_name}", goal, value, limit, value <= limit))
            cold = row.cold_seconds
            if cold is not None:
                goal, limit = f"<= {MOST_COLD_SECONDS:g} s", MOST_COLD_SECONDS
                found.append(Outcome(case, "first call", goal, cold, limit, cold <= limit))
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "meta": {**self.meta, "interrupted": self.interrupted},
            "rows": [asdict(row) for row in self.rows],
            "goals": [{**asdict(o), "factor": o.factor} for o in self.outcomes()],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "KernelsResult":
        known = {f.name for f in fields(KernelRow)}
        rows = [KernelRow(**{k: v for k, v in row.items() if k in known}) for row in value["rows"]]
        return cls(value["meta"], rows)
