"""What the page of ``linattn lab icl`` shows: risks against numbers of examples, learnt steps, and sentences."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from linattn.lab.page import Section
from linattn.lab.page.plots import INK, Chart, Panel, Style, plot_line, styles
from linattn.lab.theory.icl.experiment import EXACT, GATED, H3, LINEAR, place_of, signed

if TYPE_CHECKING:
    from pandas import DataFrame

Row = Mapping[str, Any]
NAMES = {"linear": "linear attention", "h3": "H3", "gated": "gated linear attention", "canon": "Canon + linear"}
EVEN = 1e-9  # gains below this mean that formulas give the same number
READING = (
    "Risk E (y - f)² / d against the number of examples: solid lines are trained models, the best of seeds, dotted "
    "ones the formula. "
)
FAMILIES = {  # title, and what there is to see
    "independent": (
        "Independent examples",
        "Examples may be swapped: weighting them gains nothing, H3 and linear attention have one formula.",
    ),
    "retrieval": (
        "Retrieved examples: features lean towards the query",
        "a: correlation of the examples' features with the query's. The more, the fewer examples are needed.",
    ),
    "alignment": (
        "Aligned examples: features lean towards the task",
        "a: how far features lean towards the task vector.",
    ),
    "low-rank": (
        "Attention of low rank",
        "Wq and Wk have r columns. Eigenvalues of the tasks' covariance fall as 1/i.",
    ),
    "low-rank-update": (
        "Low-rank updates (LoRA) after a shift of tasks",
        "Trained on one covariance of tasks, then an update of rank r is learnt on another one.",
    ),
    "drift": (
        "Drifting tasks",
        "Each example's task has the correlation memory^age with the query's. Free weights (H3) can forget, equal ones "
        "(linear attention) cannot. Dotted: free weights, the best constant gate, equal weights.",
    ),
}


def summary(rows: Sequence[Row], tolerance: float) -> list[str]:
    """A sentence per model, then H3 beside linear attention."""
    said = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        name = NAMES.get(model, model)
        name = name[0].upper() + name[1:]
        shares = [row["deviation"] for row in own]
        if model in EXACT:
            within, worst = sum(abs(share) <= tolerance for share in shares), max(own, key=_distance)
            said.append(
                f"{name}: {within} of {len(own)} runs within {100 * tolerance:g} % of the formula, the farthest "
                f"{signed(worst['deviation'])} ({place_of(worst)})."
            )
        else:
            beside = "the best constant gate" if model == GATED else NAMES[LINEAR]
            said.append(f"{name}: {signed(min(shares))} to {signed(max(shares))} beside the formula of {beside}.")
    return [*said, *_gain_sentences(gains(rows))]


def _distance(row: Row) -> float:
    return abs(row["deviation"])


def gains(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What H3 gains over linear attention, as a share of the latter's risk: measured, and by the formulas."""
    found = []
    for place in dict.fromkeys((row["family"], row["case"], row["n"]) for row in rows):
        own = [row for row in rows if (row["family"], row["case"], row["n"]) == place]
        linear, h3 = ([row for row in own if row["model"] == model] for model in (LINEAR, H3))
        if linear and h3:
            measured = 1 - min(row["trained"] for row in h3) / min(row["trained"] for row in linear)
            theory = 1 - h3[0]["theory"] / linear[0]["theory"]
            found.append(
                {"data": f"{place[0]}, {place[1]}", "n": place[2], "measured": measured, "by the formulas": theory}
            )
    return found


def _gain_sentences(found: Sequence[Row]) -> list[str]:
    said = []
    even, ahead = ([gain for gain in found if (gain["by the formulas"] > EVEN) == wins] for wins in (False, True))
    if even:
        most = max(even, key=lambda gain: abs(gain["measured"]))
        said.append(
            "Where examples may be swapped, H3 and linear attention differ by at most "
            f"{100 * abs(most['measured']):.2f} % of the risk ({most['data']}, n = {most['n']}); by the formulas not "
            "at all."
        )
    if ahead:
        best = max(ahead, key=lambda gain: gain["by the formulas"])
        far = max(abs(gain["measured"] - gain["by the formulas"]) for gain in ahead)
        said.append(
            f"Where tasks drift, H3 wins up to {100 * best['measured']:.1f} % of the risk ({best['data']}, n = "
            f"{best['n']}), by the formulas {100 * best['by the formulas']:.1f} %; gain and formula differ by at most "
            f"{100 * far:.2f} % of the risk."
        )
    return said


def sections(frame: "DataFrame") -> list[Section]:
    """Risks by family, learnt steps, the gain of H3, every trained model."""
    rows = frame.to_dict("records")
    found = [Section(FAMILIES[f][0], chart=_family(rows, f)) for f in dict.fromkeys(row["family"] for row in rows)]
    if any(row["model"] in EXACT for row in rows):
        found.append(Section("The learnt preconditioner", chart=_steps([row for row in rows if row["model"] in EXACT])))
    if gains(rows):
        table = type(frame)(gains(rows))
        table[["measured", "by the formulas"]] *= 100
        reading = (
            "The share of linear attention's risk that H3 takes away. Only where examples cannot be swapped, that is "
            "where tasks drift, do the formulas differ. Both are tested on the same tasks."
        )
        units = {"measured": "%", "by the formulas": "%"}
        found.append(Section("H3 beside linear attention", reading, table=table, units=units))
    units = {"theory": "risk/d", "formula_measured": "risk/d", "trained": "risk/d", "step_error": "relative"}
    return [*found, Section("Every trained model", table=frame, units=units)]


def _family(rows: Sequence[Row], family: str) -> Chart:
    """One panel per model with a curve per case or, where models are compared, the other way round."""
    own = [row for row in rows if row["family"] == family]
    panels, lines = ("case", "model") if family == "drift" else ("model", "case")
    look = styles(list(dict.fromkeys(_name(row, lines) for row in own)))
    # Where models are compared, each panel has its own range, which shows their differences.
    top = None if family == "drift" else 1.05 * max(max(row["theory"], row["trained"]) for row in own)
    made = []
    for title in dict.fromkeys(row[panels] for row in own):
        shown = [row for row in own if row[panels] == title]
        name = NAMES.get(title, title)
        ends = "; ".join(_end(shown, label, lines) for label in dict.fromkeys(_name(row, lines) for row in shown))
        draw = partial(_draw, rows=shown, look=look, lines=lines, title=f"{name}: risk / d", top=top)
        made.append(Panel(draw, f"Risk against examples, {name}: {ends}."))
    return Chart(f"icl-{family}", FAMILIES[family][0], READING + FAMILIES[family][1], made, look)


def _draw(
    axes: Any, *, rows: Sequence[Row], look: Mapping[str, Style], lines: str, title: str, top: float | None
) -> None:
    for label, style in look.items():
        own = [row for row in rows if _name(row, lines) == label]
        lengths = sorted({row["n"] for row in own})
        if own:
            plot_line(axes, [float(n) for n in lengths], [_best(own, n, "trained") for n in lengths], style)
            # In ink and on top: where theory and training agree, both stay visible.
            theory = [_best(own, n, "theory") for n in lengths]
            axes.plot(lengths, theory, color=INK, linestyle=":", linewidth=1.8, zorder=4)
    axes.set_xticks(sorted({row["n"] for row in rows}))
    if top is not None:
        axes.set_ylim(0, top)
    axes.set_title(title)
    axes.set_xlabel("examples n")


def _steps(rows: Sequence[Row]) -> Chart:
    """Distance of the steps that were learnt from those of the formula."""
    look = styles(list(dict.fromkeys(row["family"] for row in rows)))
    panels = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        draw = partial(_draw_steps, rows=own, look=look, title=f"{NAMES[model]}: relative error")
        worst = max(row["step_error"] or 0.0 for row in own)
        panels.append(Panel(draw, f"Distance of the learnt preconditioner, {NAMES[model]}: at most {worst:.3f}."))
    reading = (
        "How far the learnt step is from the formula's: |W w - W* w*| / |W* w*| in the Frobenius norm over all "
        "examples, the mean over cases and seeds. Read off from answers, so that no factor of W has to be chosen."
    )
    return Chart("icl-preconditioner", "The learnt preconditioner", reading, panels, look)


def _draw_steps(axes: Any, *, rows: Sequence[Row], look: Mapping[str, Style], title: str) -> None:
    for family, style in look.items():
        own = [row for row in rows if row["family"] == family]
        lengths = sorted({row["n"] for row in own})
        errors = [[row["step_error"] or 0.0 for row in own if row["n"] == n] for n in lengths]
        plot_line(axes, [float(n) for n in lengths], [sum(found) / len(found) for found in errors], style)
    axes.set_xticks(sorted({row["n"] for row in rows}))
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel("examples n")


def _end(rows: Sequence[Row], label: str, lines: str) -> str:
    own = [row for row in rows if _name(row, lines) == label]
    n = max(row["n"] for row in own)
    return f"{label} has {_best(own, n, 'trained'):.3f} at n = {n}, by the formula {_best(own, n, 'theory'):.3f}"


def _best(rows: Sequence[Row], n: int, name: str) -> float:
    return min(float(row[name]) for row in rows if row["n"] == n)


def _name(row: Row, attribute: str) -> str:
    return NAMES.get(row[attribute], str(row[attribute]))
