"""The page of the laboratory: figures, the gain of H3, every run, and how it was made."""

from linattn.lab.page.markup import Markup, element, unbroken
from linattn.lab.page.numbers import Unit, counted
from linattn.lab.pages.details import fold
from linattn.lab.pages.frame import chart_section, document, made_section, pairs, table_section
from linattn.lab.pages.table import Cell, Column, table
from linattn.lab.theory.icl.charts import charts_of, model_name
from linattn.lab.theory.icl.rows import Result, Row
from linattn.lab.theory.icl.words import summary

TITLE = "In-context linear estimation: trained models and closed forms"
LEAD = (
    "One layer reads examples (x, y) of a linear task and answers for one more x. The best it can do is one step of "
    "preconditioned gradient descent, whose risk is known in closed form."
)
FOUR, PERCENT, THREE = Unit(decimals=4), Unit(0.01, decimals=2, signed=True), Unit(decimals=3)


def page(result: Result) -> str:
    """The text of the page; the same results give the same text."""
    state = [element("p", "Unfinished", class_="tag")] if result.interrupted else []
    found = [element("p", unbroken(line), class_="summary") for line in summary(result)]
    opening = element("header", *state, element("h1", TITLE), element("p", LEAD, class_="lead"), *found)
    charts = [chart_section(chart) for chart in charts_of(result)]
    settings = fold("Settings", pairs(result.meta["settings"]))
    return document(TITLE, opening, *charts, _gains(result), _runs(result), made_section(result.meta, settings))


def _gains(result: Result) -> Markup | None:
    gains = result.gains()
    if not gains:
        return None
    names = [f"{gain.family}, {gain.case}" for gain in gains]
    columns = [
        Column("examples", "", [Cell(str(gain.n), gain.n) for gain in gains]),
        Column("measured", "%", [Cell(PERCENT.text(gain.measured), gain.measured) for gain in gains]),
        Column("by the formulas", "%", [Cell(PERCENT.text(gain.theory), gain.theory) for gain in gains]),
    ]
    reading = (
        "The share of linear attention's risk that H3 takes away. Only where samples cannot be swapped, that is where "
        "tasks drift, do the formulas differ. Both are tested on the same tasks."
    )
    return table_section("H3 beside linear attention", "gains", table("Gains", "data", names, names, columns), reading)


def _runs(result: Result) -> Markup:
    parts = []
    for family, model in dict.fromkeys((row.family, row.model) for row in result.rows):
        rows = result.select(family=family, model=model)
        names = [row.case for row in rows]
        title = f"{family}, {model_name(model)}"
        parts.append(fold(title, table(title, "case", names, names, _columns(rows)), count=counted(len(rows), "model")))
    return element("section", element("h2", "Every trained model"), *parts, id="runs")


def _columns(rows: list[Row]) -> list[Column]:
    return [
        Column("examples", "", [Cell(str(row.n), row.n) for row in rows]),
        Column("seed", "", [Cell(str(row.seed), row.seed) for row in rows]),
        _numbers(rows, "formula", "risk/d", "theory", FOUR),
        _numbers(rows, "formula, measured", "risk/d", "formula_measured", FOUR),
        _numbers(rows, "trained", "risk/d", "trained", FOUR),
        _numbers(rows, "standard error", "risk/d", "standard_error", FOUR),
        _numbers(rows, "trained / formula - 1", "%", "deviation", PERCENT),
        _numbers(rows, "trained / measured - 1", "%", "excess", PERCENT),
        _numbers(rows, "preconditioner", "relative error", "step_error", THREE),
    ]


def _numbers(rows: list[Row], title: str, unit: str, name: str, shown: Unit) -> Column:
    return Column(title, unit, [Cell(shown.text(value), value) for value in (getattr(row, name) for row in rows)])
