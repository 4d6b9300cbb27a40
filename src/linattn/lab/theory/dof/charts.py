"""Charts and the page: errors against the number of features, solid as measured, dotted for the bound."""

from functools import partial
from math import exp, log
from statistics import fmean
from typing import Any

from linattn.lab.page.markup import Markup, element
from linattn.lab.page.numbers import MISSING, short
from linattn.lab.page.plots import Chart, Panel, plot_line
from linattn.lab.page.style import Style, styles
from linattn.lab.pages.details import fold
from linattn.lab.pages.frame import chart_section, document, made_section, pairs, table_section
from linattn.lab.pages.table import Cell, Column, table
from linattn.lab.theory.dof.measure import SAMPLINGS, Row

TITLE = "Random features of the attention kernel"
ERRORS = {
    "kernel": "Error of the kernel, relative",
    "sum": "Error of the worst attention-weighted sum, relative",
    "row": "Total variation of attention rows",
}
WORDS = {"normal": "z ~ N(0, I)", "leverage": "leverage scores"}
READING = (
    "Lines are geometric means over heads and seeds, bands go from the lowest to the highest. Dotted: the bound for "
    "leverage scores, which holds with the probability of the settings. For z ~ N(0, I) the theory has no "
    "finite bound: its leverage scores have no largest one. An error of 1 is that of estimating zero. Attention rows "
    "are those of the estimated kernel divided by their sums; of them the theory says nothing."
)


def charts_of(rows: list[Row]) -> list[Chart]:
    """One chart per source."""
    return [_chart([row for row in rows if row.source == source]) for source in dict.fromkeys(r.source for r in rows)]


def _chart(rows: list[Row]) -> Chart:
    look = dict(zip(WORDS.values(), styles(list(WORDS.values())).values(), strict=True))
    source = rows[0].source
    panels = []
    for name, title in ERRORS.items():
        ends = "; ".join(f"{WORDS[s]} {_last(rows, s, name):.2g}" for s in SAMPLINGS)
        draw = partial(_draw, rows=rows, name=name, title=title, look=look)
        panels.append(Panel(draw, f"{title}, with the most features: {ends}.", left=0.62))
    return Chart(f"dof-{source}", f"Activations: {source}", READING, panels, look)


def _last(rows: list[Row], sampling: str, name: str) -> float:
    return curve(rows, sampling, name)[-1][1]


def curve(rows: list[Row], sampling: str, name: str) -> list[tuple[int, float, float, float]]:
    """For each number of features: geometric mean, lowest and highest error over heads and seeds."""
    found = []
    for count in sorted({row.count for row in rows}):
        chosen = [row for row in rows if row.sampling == sampling and row.count == count]
        errors = [error for row in chosen for error in getattr(row, f"{name}_error")]
        found.append((count, exp(fmean(log(error) for error in errors)), min(errors), max(errors)))
    return found


def bound_curve(rows: list[Row], name: str) -> list[tuple[int, float]]:
    """The largest bound over all heads; empty if there is none."""
    bounds: dict[int, list[float]] = {}
    for row in rows:
        value = getattr(row, f"{name}_bound", None)
        if value is not None:
            bounds.setdefault(row.count, []).append(value)
    return [(count, max(values)) for count, values in sorted(bounds.items())]


def _draw(axes: Any, *, rows: list[Row], name: str, title: str, look: dict[str, Style]) -> None:
    for sampling, words in WORDS.items():
        counts, means, lows, highs = map(list, zip(*curve(rows, sampling, name), strict=True))
        axes.fill_between(counts, lows, highs, color=look[words].color, alpha=0.15, linewidth=0)
        plot_line(axes, counts, means, look[words])
    bound = bound_curve(rows, name)
    if bound:
        axes.plot(*zip(*bound, strict=True), color=look[WORDS["leverage"]].color, linestyle=":", linewidth=1.6)
    counts = sorted({row.count for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    if name == "row":
        axes.set_ylim(bottom=0)
    else:
        from matplotlib.ticker import FuncFormatter, LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_xlabel("features M")


def _table(rows: list[Row]) -> Markup:
    heads = [f"{row.source}, {row.head}, {WORDS[row.sampling]}, M = {row.count}" for row in rows]
    columns = [Column("degrees of freedom", "", [Cell(f"{row.degrees:.1f}", row.degrees) for row in rows])]
    for name in ERRORS:
        means = [fmean(getattr(row, f"{name}_error")) for row in rows]
        columns.append(Column(f"{name} error", "mean of seeds", [Cell(f"{mean:.3g}", mean) for mean in means]))
        bounds = [getattr(row, f"{name}_bound", None) for row in rows]
        if any(bound is not None for bound in bounds):
            cells = [Cell(MISSING if bound is None else f"{bound:.3g}", bound) for bound in bounds]
            columns.append(Column(f"{name} bound", "", cells))
    return table("Errors", "head, drawing, features", heads, heads, columns)


def page(meta: dict[str, Any], rows: list[Row], charts: list[Chart], summary: str) -> str:
    """The text of the page; the same results give the same text."""
    reading = "Means over seeds of each head; a bound is of leverage scores alone."
    return document(
        TITLE,
        element("header", element("h1", TITLE), element("p", summary, class_="summary")),
        *map(chart_section, charts),
        table_section("Errors, head by head", "errors", _table(rows), reading),
        made_section(meta, fold("Settings", pairs(meta["settings"]))),
    )
