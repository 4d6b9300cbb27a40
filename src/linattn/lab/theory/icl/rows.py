"""Rows of results, kept in a file from which a later run can go on."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from linattn.lab.theory.icl.settings import EXACT, H3, LINEAR
from linattn.support.files import write_json
from linattn.support.options import OptionError


@dataclass(frozen=True)
class Row:
    """One trained model. Risks are ``E (y - f)^2 / d``; measured ones are taken over the same test tasks."""

    family: str
    case: str
    model: str
    n: int
    seed: int
    theory: float
    formula_measured: float  # of the formula's predictor
    trained: float
    standard_error: float
    deviation: float  # trained / theory - 1
    excess: float  # trained / formula_measured - 1: the luck of the test tasks cancels
    step_error: float | None  # of the learnt W w_i, relative to the formula's; mechanisms that divide have no W


@dataclass(frozen=True)
class Gain:
    """What H3 gains over linear attention, as a share of the latter's risk: measured, and by the formulas."""

    family: str
    case: str
    n: int
    measured: float
    theory: float


@dataclass
class Result:
    """All rows so far; a unit is a pair (family, model), whose rows come together."""

    meta: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    @property
    def done(self) -> set[tuple[str, str]]:
        return {(row.family, row.model) for row in self.rows}

    def select(self, **wanted: object) -> list[Row]:
        return [row for row in self.rows if all(getattr(row, name) == value for name, value in wanted.items())]

    def worst(self, model: str) -> Row | None:
        return max(self.select(model=model), key=lambda row: abs(row.deviation), default=None)

    @property
    def beyond(self) -> list[Row]:
        """Models whose optimum the formula is, but whose best seed is farther from it than the tolerance, by more than
        the luck of the test tasks (two standard errors) explains."""
        best: dict[tuple[str, str, str, int], Row] = {}
        for row in (row for row in self.rows if row.model in EXACT):
            place = (row.family, row.case, row.model, row.n)
            if place not in best or not row.trained >= best[place].trained:
                best[place] = row
        return [row for row in best.values() if not abs(row.deviation) <= self._allowed(row)]

    def _allowed(self, row: Row) -> float:
        return float(self.meta["settings"]["tolerance"]) + 2 * row.standard_error / row.theory

    def gains(self) -> list[Gain]:
        found = []
        for row in self.select(model=LINEAR, seed=0):
            where = {"family": row.family, "case": row.case, "n": row.n}
            linear, h3 = self.select(model=LINEAR, **where), self.select(model=H3, **where)
            if h3:
                measured = 1 - min(own.trained for own in h3) / min(own.trained for own in linear)
                found.append(Gain(row.family, row.case, row.n, measured, 1 - h3[0].theory / row.theory))
        return found

    def save(self, path: Path) -> None:
        meta = {**self.meta, "interrupted": self.interrupted}
        rows, gains = ([asdict(part) for part in parts] for parts in (self.rows, self.gains()))
        write_json(path, {"meta": meta, "rows": rows, "gains": gains})


def earlier_rows(path: Path, settings: dict[str, Any]) -> list[Row]:
    """The rows of a file that was written with the same settings; none if there is no file."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        same = found["meta"]["settings"] == json.loads(json.dumps(settings))
        rows = [Row(**{name: row[name] for name in _FIELDS}) for row in found["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError("resume", f"{path} is not a result of this command") from error
    if not same:
        raise OptionError("resume", f"{path} was made with other settings; use another name, or leave --resume out")
    return rows


_FIELDS = tuple(own.name for own in fields(Row))
