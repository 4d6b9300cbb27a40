"""One self-contained HTML page from sections: text, a table, charts. Nothing in it is loaded from elsewhere."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linattn.lab.page.plots import WIDTH, Chart, Style, save_png, svg
from linattn.support.files import write_atomically

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading.

    ``table``: its first column has the names of rows; ``units``: what stands below the titles of columns, by title.
    ``chart``: saved beside the page as a PNG, too. ``facts``: values by name. ``fold``: a part that opens when it is
    clicked.
    """

    title: str
    text: str = ""
    table: "DataFrame | None" = None
    units: Mapping[str, str] = field(default_factory=dict)
    chart: Chart | None = None
    facts: Mapping[str, Any] | None = None
    fold: bool = False

    @property
    def name(self) -> str:
        return self.chart.name if self.chart else re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Cell:
    """A cell that shows more than the ``value`` by which its column is sorted.

    ``note``: words below the text. ``style``: that of the mechanism which the text names. ``tag``: words beside it.
    """

    text: str
    value: object = None
    note: str = ""
    style: Style | None = None
    tag: str = ""

    def __str__(self) -> str:
        return self.text


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

    loader = jinja2.PackageLoader("linattn.lab.page", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"shown": shown, "svg": svg}
    source = {name: loader.get_source(environment, f"page.{name}")[0] for name in ("css", "js")}
    return environment.get_template("page.html").render(
        title=title, lead=lead, summary=summary, sections=sections, meta=meta, width=f"{WIDTH * 72:g}", **source
    )


def shown(value: object) -> str:
    """A value of a table or of a setting as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={shown(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if value is None or isinstance(value, bool) or value != value:
        return "–" if value is None or value != value else "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
