"""The page of a comparison: one HTML file that needs nothing else."""

from typing import Any

from linattn.lab.page.markup import Markup, element, unbroken
from linattn.lab.page.numbers import MISSING
from linattn.lab.pages.charts import charts_of
from linattn.lab.pages.charts_maps import map_grid, map_names
from linattn.lab.pages.details import failures, layer_details, run_details, sweep_details
from linattn.lab.pages.frame import chart_section, document, table_section
from linattn.lab.pages.read import Comparison
from linattn.lab.pages.setting import how_it_was_made, setting_sentence
from linattn.lab.pages.summary import edge_sentence, ranking_sentence
from linattn.lab.pages.table import results_table


def page(results: dict[str, Any], examples: dict[str, Any] | None) -> str:
    """The text of the page; the same results give the same text."""
    comparison = Comparison(results)
    name = str(comparison.part("data").get("name") or "unnamed data")
    title = f"Attention mechanisms compared on {name}"
    return document(
        title,
        _opening(comparison, title, f"{ranking_sentence(results)} {edge_sentence(results)}".strip()),
        _results(comparison),
        failures(comparison),
        *(chart_section(chart) for chart in charts_of(comparison)),
        _maps(comparison, examples),
        _layers(comparison),
        _runs(comparison),
        how_it_was_made(comparison),
    )


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
    return table_section("Results", "results", results_table(comparison), reading)


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
