"""The page of the experiment: one HTML file that needs nothing else, in the style of the report."""

from typing import Any

from linattn.lab.page.markup import Markup, element, join
from linattn.lab.page.numbers import Unit
from linattn.lab.page.plots import Chart
from linattn.lab.pages.details import fold
from linattn.lab.pages.frame import chart_section, document, made_section, pairs
from linattn.lab.pages.table import Cell, Column, table
from linattn.lab.theory.entropy.charts import Curve
from linattn.lab.theory.entropy.sequences import Check

TITLE = "Attention entropy and the norm of queries"


def page(
    meta: dict[str, Any],
    summary: str,
    checks: list[Check],
    charts: list[Chart],
    groups: dict[str, dict[str, Curve]],
    left_out: dict[str, str],
) -> str:
    """The text of the page; the same results give the same text."""
    opening = element("header", element("h1", TITLE), element("p", summary, class_="summary"))
    settings = fold("Settings", pairs(meta["settings"]))
    return document(
        TITLE,
        opening,
        _checks(checks),
        *map(chart_section, charts),
        _numbers(groups),
        _left_out(left_out),
        made_section(meta, settings),
    )


def _checks(checks: list[Check]) -> Markup:
    parts = []
    for check in checks:
        numbers = ", ".join(f"{name}: {value:.4g}" for name, value in check.numbers.items())
        verdict = element("b", "pass" if check.passed else "FAIL")
        parts.append(element("li", verdict, join(f" ({check.kind}) {check.statement}. "), element("small", numbers)))
    return element("section", element("h2", "Theorems, checked"), element("ul", *parts), id="checks")


def _numbers(groups: dict[str, dict[str, Curve]]) -> Markup:
    """For each group: entropy of the shortest and of the longest queries, and the correlation."""
    parts = []
    for title, curves in groups.items():
        if not curves:
            continue
        names, unit, signed = list(curves), Unit(decimals=3), Unit(decimals=2, signed=True)
        found: list[Curve] = list(curves.values())
        columns = [
            Column("shortest queries", "nats", [Cell(unit.text(c.pse[0]), c.pse[0]) for c in found]),
            Column("longest queries", "nats", [Cell(unit.text(c.pse[-1]), c.pse[-1]) for c in found]),
            Column("correlation", "with the norm", [Cell(signed.text(c.correlation), c.correlation) for c in found]),
            Column("as queries grow", "", [Cell(c.kind, c.kind) for c in found]),
        ]
        parts.append(fold(title, table(title, "mechanism", names, names, columns)))
    return element("section", element("h2", "Numbers"), *parts, id="numbers")


def _left_out(left_out: dict[str, str]) -> Markup | None:
    if not left_out:
        return None
    items = [element("li", element("b", name), join(f": {reason}")) for name, reason in left_out.items()]
    return element("section", element("h2", "Left out"), element("ul", *items, class_="failed"), id="left-out")
