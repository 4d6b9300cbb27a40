"""Sentences about the findings, which claim no more than the rows show."""

from linattn.lab.page.numbers import counted
from linattn.lab.theory.icl.charts import model_name
from linattn.lab.theory.icl.rows import Gain, Result, Row
from linattn.lab.theory.icl.settings import EXACT

EVEN = 1e-9  # gains below this mean that formulas give the same number
EQUAL = "linear attention"
REFERENCES = {"gated": "the best constant gate"}


def summary(result: Result) -> list[str]:
    """A sentence per model, then H3 beside linear attention."""
    models = dict.fromkeys(row.model for row in result.rows)
    return [*(_distance(result, model) for model in models), *_gain_words(result.gains())]


def _distance(result: Result, model: str) -> str:
    rows = result.select(model=model)
    name = model_name(model)
    name = name[0].upper() + name[1:]
    if model not in EXACT:
        low, high = min(row.deviation for row in rows), max(row.deviation for row in rows)
        return f"{name}: {_signed(low)} to {_signed(high)} beside the formula of {REFERENCES.get(model, EQUAL)}."
    tolerance = result.meta["settings"]["tolerance"]
    within = sum(abs(row.deviation) <= tolerance for row in rows)
    worst = result.worst(model)
    assert worst is not None
    return (
        f"{name}: {within} of {counted(len(rows), 'run')} within {100 * tolerance:g} % of the formula, the farthest "
        f"{_signed(worst.deviation)} ({place(worst)})."
    )


def _gain_words(gains: list[Gain]) -> list[str]:
    lines = []
    even, ahead = ([gain for gain in gains if (gain.theory > EVEN) == wins] for wins in (False, True))
    if even:
        most = max(even, key=lambda gain: abs(gain.measured))
        lines.append(
            f"Where examples may be swapped, H3 and linear attention differ by at most {100 * abs(most.measured):.2f} "
            f"% of the risk ({most.family}, {most.case}, n = {most.n}); by the formulas not at all."
        )
    if ahead:
        best = max(ahead, key=lambda gain: gain.theory)
        far = max(abs(gain.measured - gain.theory) for gain in ahead)
        lines.append(
            f"Where tasks drift, H3 wins up to {100 * best.measured:.1f} % of the risk ({best.case}, n = {best.n}), by "
            f"the formulas {100 * best.theory:.1f} %; gain and formula differ by at most {100 * far:.2f} % of the risk."
        )
    return lines


def place(row: Row) -> str:
    return f"{row.family}, {row.case}, n = {row.n}, seed {row.seed}"


def _signed(value: float) -> str:
    return f"{100 * value:+.2f} %"
