"""Shows a diagnosis on the screen, as JSON and as a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from linattn.convert.inspect.diagnosis import LayerDiagnosis
from linattn.convert.inspect.fit import STATE_LENGTH
from linattn.lab.convert.report.charts import freedom_chart
from linattn.lab.convert.report.panels import Curves, curve_panel, stage_styles
from linattn.lab.page.markup import Markup, element
from linattn.lab.page.numbers import Unit, common_unit
from linattn.lab.page.plots import Chart, Panel
from linattn.lab.pages.frame import chart_section, document, made_section, pairs, table_section, write_page
from linattn.lab.pages.table import Cell, Column, table
from linattn.support.files import write_json

Layer = Mapping[str, Any]
# Title, unit, decimals, and the function that reads a layer's number.
COLUMNS: list[tuple[str, str, int, Any]] = [
    ("entropy", "nats", 2, lambda layer: mean(layer["entropy"])),
    ("even", "nats", 2, lambda layer: layer["even_entropy"]),
    ("|q|", "", 2, lambda layer: mean(layer["q_norm"])),
    ("|k|", "", 2, lambda layer: mean(layer["k_norm"])),
    ("far", "%", 1, lambda layer: 100 * mean(layer["far"])),
    ("sinks", "%", 1, lambda layer: 100 * mean(layer["sinks"])),
    ("freedom", "mean", 1, lambda layer: mean(layer["degrees_of_freedom"])),
    ("freedom", "most", 1, lambda layer: max(layer["degrees_of_freedom"])),
    ("dimension", "", 0, lambda layer: layer["dimension"]),
]
SCREEN = ("entropy", "even", "|q|", "|k|", "far %", "sinks %", "free", "most", "dim")
READING = (
    "Entropy: how widely a token spreads its attention; even: what it would be over all keys alike. Far: weight beyond "
    "the window, without the first four tokens, which are the sinks. Freedom: degrees of freedom of the exponential "
    "kernel on the layer's queries and keys, over its heads: about as many features it takes. Dimension: features of "
    "each layer if the same number is given out in proportion. Fits: the candidate with the smallest state among those "
    "that miss hardly more of the softmax output than the best one."
)


def screen_table(found: Sequence[LayerDiagnosis]) -> Table:
    """A table with one row per layer and means over heads."""
    shown = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("layer", *SCREEN, "missed", "fits"):
        shown.add_column(name, justify="left" if name == "fits" else "right", no_wrap=True)
    for diagnosis in found:
        layer = diagnosis.as_dict()
        numbers = [f"{number(layer):.{decimals}f}" for _, _, decimals, number in COLUMNS]
        shown.add_row(str(layer["layer"]), *numbers, f"{_missed(layer):.4f}", layer["choice"])
    return shown


def write_diagnosis(folder: Path, meta: Mapping[str, Any], found: Sequence[LayerDiagnosis], *, page: bool) -> None:
    """Write ``inspect.json`` and, with ``page``, ``inspect.html`` and the charts as PNG files."""
    layers = [diagnosis.as_dict() for diagnosis in found]
    results = {"meta": dict(meta), "layers": layers}
    write_json(folder / "inspect.json", results)
    if not page:
        return
    charts = {f"charts/{chart.name}.png": chart for chart in charts_of(layers)}
    write_page(folder / "inspect.html", diagnosis_page(results), charts)


def diagnosis_page(results: Mapping[str, Any]) -> str:
    """The text of the page; the same results give the same text."""
    meta, layers = results["meta"], results["layers"]
    title = f"The attention of {meta.get('model', 'a model')}"
    parts: list[Markup | None] = [
        element("header", element("h1", title), element("p", summary(layers), class_="summary")),
        table_section("Layer by layer", "layers", _figures(layers), READING),
        *(chart_section(chart) for chart in charts_of(layers)),
        table_section("What could take its place", "fits", _fits(layers), _fits_reading(meta)),
        made_section(meta, *([pairs(meta["settings"])] if meta.get("settings") else [])),
    ]
    return document(title, *parts)


def summary(layers: Sequence[Layer]) -> str:
    """Say in a sentence which candidates fit.

    Example:
        >>> summary([{"choice": "window"}, {"choice": "still"}, {"choice": "window"}])
        'window fits 2 of 3 layers, still fits 1 of 3 layers.'
    """
    chosen = [layer["choice"] for layer in layers]
    order = sorted(set(chosen), key=lambda name: (-chosen.count(name), name))
    return ", ".join(f"{name} fits {chosen.count(name)} of {len(chosen)} layers" for name in order) + "."


def _missed(layer: Layer) -> float:
    return float(next(fit["missed"] for fit in layer["fits"] if fit["name"] == layer["choice"]))


def _figures(layers: Sequence[Layer]) -> Markup:
    names = [str(layer["layer"]) for layer in layers]
    columns = []
    for title, unit, decimals, number in COLUMNS:
        values = [float(number(layer)) for layer in layers]
        columns.append(Column(title, unit, [Cell(Unit(decimals=decimals).text(value), value) for value in values]))
    columns.append(Column("fits", "", [Cell(layer["choice"], layer["choice"]) for layer in layers]))
    return table("Layers", "layer", names, names, columns)


def _fits(layers: Sequence[Layer]) -> Markup:
    """Table of candidates (rows) and layers (columns); the state comes first."""
    names = [fit["name"] for fit in layers[0]["fits"]]
    states = [float(fit["state"]) for fit in layers[0]["fits"]]
    unit = common_unit(states)
    columns = [Column("state", f"{unit.prefix} numbers".strip(), [Cell(unit.text(s), s) for s in states])]
    for layer in layers:
        missed = {fit["name"]: fit["missed"] for fit in layer["fits"]}
        cells = [Cell(f"{missed[name]:.4f}{' ●' if name == layer['choice'] else ''}", missed[name]) for name in names]
        columns.append(Column(f"layer {layer['layer']}", "", cells))
    return table("Candidates", "candidate", names, names, columns)


def _fits_reading(meta: Mapping[str, Any]) -> str:
    steps = (meta.get("settings") or {}).get("steps", 0)
    learned = f"after {steps} steps of training each" if steps else "as it starts, untrained"
    return (
        f"The share of the softmax output that each candidate misses on held-out text, {learned}: 0 is exact, 1 is as "
        f"bad as no output. State: numbers in the cache of the first layer after {STATE_LENGTH:,} tokens. A dot marks "
        "the one that fits."
    )


def charts_of(layers: Sequence[Layer]) -> list[Chart]:
    """Charts by layer: sharpness and reach, degrees of freedom and dimensions."""

    def curve(number: Any) -> list[tuple[float, float]]:
        return [(float(layer["layer"]), float(number(layer))) for layer in layers]

    sharp: Curves = {"entropy": curve(COLUMNS[0][3]), "even": curve(COLUMNS[1][3])}
    reach: Curves = {"far": curve(COLUMNS[4][3]), "sinks": curve(COLUMNS[5][3])}
    freedom = freedom_chart(
        {layer["layer"]: layer["degrees_of_freedom"] for layer in layers},
        {layer["layer"]: layer["dimension"] for layer in layers},
    )
    sharpness = _chart("attention", "How sharp it is, and how far it looks",
               "Left: low entropy means that a token looks at few others. Right: what a window alone would lose.",
               ("Entropy, nats", sharp), ("Weight beyond the window, %", reach))  # fmt: skip
    return [sharpness, *([] if freedom is None else [freedom])]


def _chart(name: str, title: str, reading: str, *parts: tuple[str, Curves]) -> Chart:
    look = stage_styles([series for _, curves in parts for series in curves])
    panels = [curve_panel(heading, "layer", curves, integer=True, look=look) for heading, curves in parts]
    found: list[Panel] = [panel for panel in panels if panel is not None]
    return Chart(name, title, reading, found, look)
