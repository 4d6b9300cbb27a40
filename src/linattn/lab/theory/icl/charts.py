"""Figures of the risk against the number of examples, solid for trained models, dotted for the formula."""

from functools import partial
from statistics import mean
from typing import Any

from linattn.lab.page.plots import Chart, Panel, plot_line
from linattn.lab.page.style import INK, Style, styles
from linattn.lab.theory.icl.case import TITLES
from linattn.lab.theory.icl.rows import Result, Row
from linattn.lab.theory.icl.settings import EXACT

NAMES = {"linear": "linear attention", "h3": "H3", "gated": "gated linear attention", "canon": "Canon + linear"}

READING = (
    "Risk E (y - f)² / d against the number of examples: solid lines are trained models, the best of seeds, dotted "
    "ones the formula. "
)
NOTES = {
    "independent": "Examples may be swapped: weighting them gains nothing, H3 and linear attention have one formula.",
    "retrieval": "a: correlation of the examples' features with the query's. The more, the fewer examples are needed.",
    "alignment": "a: how far features lean towards the task vector.",
    "low-rank": "Wq and Wk have r columns. Eigenvalues of the tasks' covariance fall as 1/i.",
    "low-rank-update": "Trained on one covariance of tasks, then an update of rank r is learnt on another one.",
    "drift": "Each example's task has the correlation memory^age with the query's. Free weights (H3) can forget, equal "
    "ones (linear attention) cannot. Dotted: free weights, the best constant gate, equal weights.",
}


def charts_of(result: Result) -> list[Chart]:
    families = dict.fromkeys(row.family for row in result.rows)
    return [*(_family_chart(result, family) for family in families), *_step_charts(result)]


def _family_chart(result: Result, family: str) -> Chart:
    """One panel per model with a curve per case or, where models are compared, the other way round."""
    rows = result.select(family=family)
    panels, lines = ("case", "model") if family == "drift" else ("model", "case")
    look = styles(list(dict.fromkeys(_name(row, lines) for row in rows)))
    # Where models are compared, each panel has its own range, which shows their differences.
    top = None if family == "drift" else 1.05 * max(max(row.theory, row.trained) for row in rows)
    found = []
    for title in dict.fromkeys(getattr(row, panels) for row in rows):
        own = [row for row in rows if getattr(row, panels) == title]
        name = model_name(title)
        ends = "; ".join(_end(own, label, lines) for label in dict.fromkeys(_name(row, lines) for row in own))
        draw = partial(_draw, rows=own, look=look, lines=lines, title=f"{name}: risk / d", top=top)
        found.append(Panel(draw, f"Risk against examples, {name}: {ends}."))
    return Chart(f"icl-{family}", TITLES[family], READING + NOTES[family], found, look)


def _draw(axes: Any, *, rows: list[Row], look: dict[str, Style], lines: str, title: str, top: float | None) -> None:
    for label, style in look.items():
        own = [row for row in rows if _name(row, lines) == label]
        lengths = sorted({row.n for row in own})
        if not own:
            continue
        plot_line(axes, [float(n) for n in lengths], [_best(own, n, "trained") for n in lengths], style)
        theory = [_best(own, n, "theory") for n in lengths]
        # In ink and on top: where theory and training agree, both stay visible.
        axes.plot(lengths, theory, color=INK, linestyle=":", linewidth=1.8, zorder=4)
    axes.set_xticks(sorted({row.n for row in rows}))
    if top is not None:
        axes.set_ylim(0, top)
    axes.set_title(title)
    axes.set_xlabel("examples n")


def _step_charts(result: Result) -> list[Chart]:
    """Distance of the steps that were learnt from those of the formula."""
    rows = [row for row in result.rows if row.model in EXACT]
    if not rows:
        return []
    look = styles(list(dict.fromkeys(row.family for row in rows)))
    panels = []
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        draw = partial(_draw_steps, rows=own, look=look, title=f"{NAMES[model]}: relative error")
        worst = max(row.step_error or 0.0 for row in own)
        panels.append(Panel(draw, f"Distance of the learnt preconditioner, {NAMES[model]}: at most {worst:.3f}."))
    reading = (
        "How far the learnt step is from the formula's: |W w - W* w*| / |W* w*| in the Frobenius norm over all "
        "examples, the mean over cases and seeds. Read off from answers, so that no factor of W has to be chosen."
    )
    return [Chart("icl-preconditioner", "The learnt preconditioner", reading, panels, look)]


def _draw_steps(axes: Any, *, rows: list[Row], look: dict[str, Style], title: str) -> None:
    for family, style in look.items():
        own = [row for row in rows if row.family == family]
        lengths = sorted({row.n for row in own})
        errors = [mean(row.step_error or 0.0 for row in own if row.n == n) for n in lengths]
        plot_line(axes, [float(n) for n in lengths], errors, style)
    axes.set_xticks(sorted({row.n for row in rows}))
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel("examples n")


def _end(rows: list[Row], label: str, lines: str) -> str:
    own = [row for row in rows if _name(row, lines) == label]
    n = max(row.n for row in own)
    return f"{label} has {_best(own, n, 'trained'):.3f} at n = {n}, by the formula {_best(own, n, 'theory'):.3f}"


def _best(rows: list[Row], n: int, name: str) -> float:
    return min(getattr(row, name) for row in rows if row.n == n)


def _name(row: Row, attribute: str) -> str:
    return model_name(str(getattr(row, attribute)))


def model_name(name: str) -> str:
    return NAMES.get(name, name)
