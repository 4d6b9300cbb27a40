"""Rows of a race of models, and whether each is faster than softmax."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from linattn.lab.bench.models.cases import SOFTMAX
from linattn.lab.bench.models.profiling import kind_of

Status = Literal["ok", "WRONG", "not on kernels", "absent", "left out", "out of memory", "failed"]
Key = tuple[str, str, str]  # case, mechanism, mode
BAD = ("WRONG", "not on kernels", "failed")


@dataclass
class ModelRow:
    """A training step of one model, mechanism and mode: forward, loss and backward, without the optimiser's step."""

    case: str
    mechanism: str
    mode: str
    status: Status = "ok"
    reason: str = ""  # why there are no numbers, or what is wrong
    shape: str = ""
    unit: str = ""
    parameters: int | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    per_second: float | None = None  # images or tokens
    peak_bytes: int | None = None  # beyond weights and inputs, gradients included
    first_seconds: float | None = None  # the first step: compilation
    error: float | None = None
    budget: float | None = None
    worst_tensor: str = ""
    checked_against: str = ""
    explain: dict[str, int] = field(default_factory=dict)  # form of each call of attention -> number of such calls
    explain_of: str = ""  # the part of the model whose calls those are; empty: all of it
    calls: int | None = None  # number of calls of linear attention in the whole model
    on_kernels: bool | None = None  # whether all of them use kernels; None: softmax
    beside: dict[str, int] = field(default_factory=dict)  # large operations of attention outside of its kernels
    profile: dict[str, Any] | None = None
    took: dict[str, float] = field(default_factory=dict)  # seconds of each part of this row's measurement
    checked_run: int | None = None  # number of the run that checked it beforehand; None: checked when it was timed
    same_as: str = ""  # the case that has the same model with softmax, where it was measured
    run: int = 0  # number of the run in ``meta`` that measured it

    @property
    def key(self) -> Key:
        return self.case, self.mechanism, self.mode

    @property
    def checked(self) -> bool:
        """Whether it is known which form attention takes and whether the step is right, maybe before it is timed."""
        return self.error is not None

    @property
    def feature_map(self) -> str:
        """Where the feature map is computed, as far as it was observed."""
        if self.mechanism == SOFTMAX or not self.explain:
            return ""
        if not self.beside:
            return "in kernels"
        if self.profile is None:
            return "beside"
        # A map runs in every call of attention; kernels with fewer calls belong to something else.
        named = self.profile["eager_elementwise"].items()
        calls = sum(count for name, count in named if kind_of(name) == "eager elementwise")
        return "eager" if calls >= (self.calls or sum(self.explain.values())) else "compiled"


@dataclass(frozen=True)
class ModelGoal:
    """The goal to be faster than the same model with flash softmax: ``value`` is its time over softmax's."""

    case: str
    mechanism: str
    mode: str
    value: float | None
    reached: bool | None
    reason: str = ""


@dataclass
class ModelsResult:
    """All results of one run, or of several that resumed each other, as they are written to the JSON file."""

    meta: dict[str, Any]
    rows: list[ModelRow] = field(default_factory=list)
    interrupted: bool = False
    checked: dict[Key, ModelRow] = field(default_factory=dict)  # checked beforehand, and not measured yet

    @property
    def right(self) -> bool:
        return not any(row.status in BAD for row in self.rows)

    @property
    def run(self) -> int:
        return len(self.meta.get("runs", [])) - 1

    def find(self, case: str, mechanism: str, mode: str) -> ModelRow | None:
        return next((row for row in self.rows if row.key == (case, mechanism, mode)), None)

    def put(self, row: ModelRow) -> None:
        """Add a row, in place of an earlier row for the same measurement; its check is kept only if it was left out.

        After a failure it is checked again.
        """
        if row.status != "left out":
            self.checked.pop(row.key, None)
        old = self.find(*row.key)
        if old is None:
            self.rows.append(row)
        else:
            self.rows[self.rows.index(old)] = row

    def over_softmax(self, row: ModelRow) -> float | None:
        """Time relative to softmax in the same case and mode."""
        other = self.find(row.case, SOFTMAX, row.mode)
        if row.median_ms is None or other is None or not other.median_ms:
            return None
        return row.median_ms / other.median_ms

    def memory_over_softmax(self, row: ModelRow) -> float | None:
        """Peak memory relative to softmax in the same case and mode."""
        other = self.find(row.case, SOFTMAX, row.mode)
        if other is None or not row.peak_bytes or not other.peak_bytes:
            return None
        return row.peak_bytes / other.peak_bytes

    def goals(self) -> list[ModelGoal]:
        found: list[ModelGoal] = []
        if self.meta["settings"]["quick"]:
            return found
        for row in self.rows:
            if row.mechanism != SOFTMAX and row.status not in ("absent", "out of memory"):
                value = self.over_softmax(row)
                reached = None if value is None else value < 1 and row.status == "ok"
                reason = row.reason if row.status != "ok" else "" if value is not None else "softmax was not measured"
                found.append(ModelGoal(*row.key, value, reached, reason))
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "meta": {**self.meta, "interrupted": self.interrupted},
            "rows": [
                {**asdict(row), "over_softmax": self.over_softmax(row), "feature_map": row.feature_map}
                for row in self.rows
            ],
            "goals": [asdict(goal) for goal in self.goals()],
            "checked": [asdict(row) for row in self.checked.values()],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ModelsResult":
        checked = [row_of(row) for row in value.get("checked", [])]
        return cls(value["meta"], [row_of(row) for row in value["rows"]], checked={row.key: row for row in checked})


def row_of(value: dict[str, Any]) -> ModelRow:
    known = {f.name for f in fields(ModelRow)}
    row = ModelRow(**{k: v for k, v in value.items() if k in known})
    for name in ("error", "budget"):
        if isinstance(getattr(row, name), str):  # JSON has no inf and no nan
            setattr(row, name, float(getattr(row, name)))
    return row
