"""One self-contained HTML page from sections: text, a table, charts. Nothing in it is loaded from elsewhere."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linattn.lab.page.markup import unbroken
from linattn.lab.page.plots import Chart, key, save_png, svg
from linattn.lab.page.style import COLORS, OUTLINES, REFERENCE_COLOR
from linattn.support.files import write_atomically

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading.

    ``table``: its first column has the names of rows; ``units``: what stands below the titles of columns, by title.
    ``chart``: saved beside the page as a PNG, too. ``html``: markup of one's own, above the text. ``fold``: a part that
    opens when it is clicked.
    """

    title: str
    text: str = ""
    table: "DataFrame | None" = None
    units: Mapping[str, str] | None = None
    chart: Chart | None = None
    html: str = ""
    fold: bool = False

    @property
    def name(self) -> str:
        return self.chart.name if self.chart else re.sub(r"\W+", "-", self.title.lower()).strip("-")


class Cell(str):
    """A cell that shows more than the ``value`` by which its column is sorted; ``html``: it is markup already."""

    value: object

    def __new__(cls, text: str, value: object = None, *, html: bool = False) -> "Cell":
        cell = super().__new__(cls, text if html else escape(text))
        cell.value = value
        return cell

    def __html__(self) -> str:
        return str(self)


def write_page(
    path: Path, title: str, sections: Sequence[Section], meta: Mapping[str, Any], lead: str = "", summary: str = ""
) -> Path:
    """Write the page and its charts; ``meta`` says how the results were made."""
    for section in sections:
        if section.chart is not None:
            save_png(section.chart, path.parent / f"{section.name}.png")
    text = render(title, sections, meta, lead, summary)
    write_atomically(path, lambda temporary: temporary.write_text(text))
    return path


def render(title: str, sections: Sequence[Section], meta: Mapping[str, Any], lead: str = "", summary: str = "") -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    loader = jinja2.PackageLoader("linattn.lab.page", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"shown": shown, "sorted_by": sorted_by, "panels": _panels, "legend": _legend}
    source = {name: Markup(loader.get_source(environment, f"page.{name}")[0]) for name in ("css", "js")}
    template = environment.get_template("page.html")
    return template.render(
        title=title,
        lead=lead,
        summary=unbroken(summary),
        sections=sections,
        meta=meta,
        made=machine(meta),
        colors=Markup(_colors()),
        **source,
    )


def machine(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What ``meta`` says of where and when, by name."""
    found = {name: meta[name] for name in ("date", "device", "cpu", "threads") if meta.get(name) is not None}
    return found | {f"version of {package}": version for package, version in (meta.get("versions") or {}).items()}


def shown(value: object) -> str:
    """A value of a table or of a setting as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if value is None or isinstance(value, bool) or value != value:
        return "–" if value is None or value != value else "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def sorted_by(cell: object) -> object:
    """What a column is sorted by; None where nothing was measured."""
    value = cell.value if isinstance(cell, Cell) else cell
    return None if value != value else value


def _panels(chart: Chart) -> list[Any]:
    from markupsafe import Markup

    return [Markup(svg(chart, number)) for number in range(len(chart.panels))]


def _legend(chart: Chart) -> list[Any]:
    from markupsafe import Markup

    return [Markup(key(name, style, OUTLINES[style.marker])) for name, style in chart.legend.items()]


def _colors() -> str:
    """The colours of the series, for light and for dark pages."""
    numbered = list(enumerate((REFERENCE_COLOR, *COLORS)))
    light = "".join(f"--series-{i}:{pair[0]};" for i, pair in numbered)
    dark = "".join(f"--series-{i}:{pair[1]};" for i, pair in numbered)
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark) {{:root{{{dark}}}}}\n"
