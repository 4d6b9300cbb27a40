"""The page: one HTML file that needs nothing else."""

from importlib.resources import files
from typing import Any

from linattn.report.charts import charts_of
from linattn.report.charts_maps import map_grid, map_names
from linattn.report.details import failures, layer_details, run_details, sweep_details
from linattn.report.markup import Markup, element, join, unbroken
from linattn.report.numbers import MISSING
from linattn.report.panel import Chart, key, svg
from linattn.report.read import Comparison
from linattn.report.setting import how_it_was_made, setting_sentence
from linattn.report.style import COLORS, OUTLINES, REFERENCE_COLOR, Style
from linattn.report.summary import ranking_sentence
from linattn.report.table import results_table

# Nothing may be fetched: a page that tried would be stopped by the browser, and the test in a browser would see it.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(results: dict[str, Any], examples: dict[str, Any] | None) -> str:
    """The whole text; the same results give the same text."""
    comparison = Comparison(results)
    name = str(comparison.part("data").get("name") or "unnamed data")
    title = f"Attention mechanisms compared on {name}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(_colors() + _resource("page.css"))),
    )
    parts = [
        _opening(comparison, title, ranking_sentence(results)),
        _results(comparison),
        failures(comparison),
        *(_chart_section(chart) for chart in charts_of(comparison)),
        _maps(comparison, examples),
        _layers(comparison),
        _runs(comparison),
        how_it_was_made(comparison),
    ]
    main = element("main", *(part for part in parts if part))
    script = element("script", Markup(_resource("page.js")))
    return "<!DOCTYPE html>\n" + element("html", head, element("body", main, script), lang="en") + "\n"


def _opening(comparison: Comparison, title: str, summary: str) -> Markup:
    state = [] if comparison.finished else [element("p", "Unfinished", class_="tag")]
    return element(
        "header",
        *state,
        element("h1", title),
        element("p", setting_sentence(comparison), class_="lead"),
        element("p", unbroken(summary), class_="summary"),
    )


def _results(comparison: Comparison) -> Markup:
    reading = "Under each mean: the lowest and the highest seed. "
    if comparison.words.unit == "images":
        reading += "State: numbers kept per layer and image. Peak memory: of one training step. "
        reading += "Entropy gap: to softmax, zero where attention is as selective. "
    else:
        reading += (
            "State: bytes kept of one sequence to go on from, over all layers. Peak memory: of one training step. "
        )
    reading += f"{MISSING}: not measured, or the mechanism has none."
    text = element("p", reading, class_="reading")
    hint = element("p", "Swipe the table sideways for more columns.", class_="hint")
    return element("section", element("h2", "Results"), hint, results_table(comparison), text, id="results")


def _chart_section(chart: Chart) -> Markup:
    panels = [element("div", svg(chart, i), class_="panel") for i in range(len(chart.panels))]
    figure = element(
        "figure",
        *([_legend(chart.legend)] if chart.legend else []),
        element("div", *panels, class_="panels"),
        element("figcaption", chart.reading),
    )
    return element("section", element("h2", chart.title), figure, id=chart.name)


def _legend(styles: dict[str, Style]) -> Markup:
    items = [element("li", key(name, style, OUTLINES[style.marker])) for name, style in styles.items()]
    return element("ul", *items, class_="legend")


def _maps(comparison: Comparison, examples: dict[str, Any] | None) -> Markup | None:
    if not examples or not map_names(comparison.names, examples):
        return None
    layer = f" in the layer {examples['layer']}" if examples.get("layer") else ""
    reading = (
        f"Where the token in the bright frame looks{layer}. Each square is one token of the image; the brighter it is, "
        "the more weight it has. Every map is scaled to its own largest weight, so compare shapes, not brightness."
    )
    figure = element("figure", map_grid(comparison.names, examples), element("figcaption", reading))
    return element("section", element("h2", "Attention on example images"), figure, id="attention-maps")


def _layers(comparison: Comparison) -> Markup | None:
    parts = layer_details(comparison)
    if not parts:
        return None
    layers = max((comparison.layers(name) for name in comparison.names), key=len)
    names = ", ".join(str(layer.get("layer", MISSING)) for layer in layers)
    text = element("p", f"Each number is a mean over heads. Layers in order: {names}.")
    return element("section", element("h2", "What attention does, layer by layer"), text, *parts, id="layers")


def _runs(comparison: Comparison) -> Markup | None:
    if not comparison.rows:
        return None
    sweep = sweep_details(comparison)
    return element("section", element("h2", "Runs"), run_details(comparison), *([sweep] if sweep else []), id="runs")


def _colors() -> Markup:
    """The series' colours for both halves of the style sheet."""
    pairs = list(enumerate((REFERENCE_COLOR, *COLORS)))
    light = "".join(f"--series-{i}:{pair[0]};" for i, pair in pairs)
    dark = "".join(f"--series-{i}:{pair[1]};" for i, pair in pairs)
    return join(Markup(f":root{{{light}}}\n@media (prefers-color-scheme: dark) {{:root{{{dark}}}}}\n"))


def _resource(name: str) -> str:
    return files("linattn.report").joinpath(name).read_text(encoding="utf-8")
