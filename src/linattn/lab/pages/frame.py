"""The frame of every page: a head that loads nothing from elsewhere, the style sheet, sections, and files."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from linattn.lab.page.markup import Markup, element, join
from linattn.lab.page.plots import Chart, key, save_png, svg
from linattn.lab.page.style import COLORS, OUTLINES, REFERENCE_COLOR, Style
from linattn.support.files import write_atomically

# Nothing may be loaded: the browser would block it, and the test in a browser would notice.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def document(title: str, *parts: Markup | None) -> str:
    """A whole page; parts that are None are left out."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(_colors() + _resource("page.css"))),
    )
    main = element("main", *(part for part in parts if part))
    script = element("script", Markup(_resource("page.js")))
    return "<!DOCTYPE html>\n" + element("html", head, element("body", main, script), lang="en") + "\n"


def write_page(path: Path, text: str, charts: Mapping[str, Chart]) -> list[Path]:
    """Write charts as PNG files, by their names in the page's folder, then the page; returns the paths in order."""
    written = []
    for name, chart in charts.items():
        written.append(path.parent / name)
        save_png(chart, written[-1])
    write_atomically(path, lambda temporary: temporary.write_bytes(text.encode()))
    return [*written, path]


def chart_section(chart: Chart) -> Markup:
    """Panels under a heading, each an SVG inside the page, with the legend above and a reading aid below."""
    panels = [element("div", svg(chart, i), class_="panel") for i in range(len(chart.panels))]
    figure = element(
        "figure",
        *([_legend(chart.legend)] if chart.legend else []),
        element("div", *panels, class_="panels"),
        element("figcaption", chart.reading),
    )
    return element("section", element("h2", chart.title), figure, id=chart.name)


def table_section(title: str, name: str, content: Markup, reading: str) -> Markup:
    """A table under a heading, with a reading aid below."""
    hint = element("p", "Swipe the table sideways for more columns.", class_="hint")
    return element("section", element("h2", title), hint, content, element("p", reading, class_="reading"), id=name)


def made_section(meta: Mapping[str, Any], *more: Markup) -> Markup:
    """How results were made: the command, the machine, and what the caller adds."""
    machine = {name: meta[name] for name in ("date", "device", "cpu", "threads") if meta.get(name) is not None}
    machine |= {f"version of {package}": version for package, version in (meta.get("versions") or {}).items()}
    command = [element("pre", element("code", *_words(str(meta["command"]))))] if meta.get("command") else []
    return element("section", element("h2", "How it was made"), *command, pairs(machine), *more, id="made")


def pairs(values: Mapping[str, Any]) -> Markup:
    """Names and values as a list."""
    items = [element("div", element("dt", str(name)), element("dd", _shown(value))) for name, value in values.items()]
    return element("dl", *items)


def _words(command: str) -> list[Markup]:
    """Let lines break only between words or after commas: a dash at the end of a line would split an option."""
    found = []
    for word in command.split(" "):
        first, *rest = word.split(",")
        parts = [first, *(part for text in rest for part in (",", element("wbr"), text))]
        found.append(join(element("span", *parts), " "))
    return found


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if value is None or isinstance(value, bool):
        return "none" if value is None else "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _legend(styles: dict[str, Style]) -> Markup:
    items = [element("li", key(name, style, OUTLINES[style.marker])) for name, style in styles.items()]
    return element("ul", *items, class_="legend")


def _colors() -> Markup:
    """The colours of the series, for both halves of the style sheet."""
    numbered = list(enumerate((REFERENCE_COLOR, *COLORS)))
    light = "".join(f"--series-{i}:{pair[0]};" for i, pair in numbered)
    dark = "".join(f"--series-{i}:{pair[1]};" for i, pair in numbered)
    return join(Markup(f":root{{{light}}}\n@media (prefers-color-scheme: dark) {{:root{{{dark}}}}}\n"))


def _resource(name: str) -> str:
    return files("linattn.lab.page").joinpath(name).read_text(encoding="utf-8")
