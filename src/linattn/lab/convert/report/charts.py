"""Charts of a conversion: quality by length, memory and speed by context, errors by layer."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from linattn.convert.evaluate.haystack import NOISE, TEXT
from linattn.lab.convert.report.haystacks import haystack_of, haystack_words
from linattn.lab.convert.report.panels import Curves, curve_panel, stage_styles
from linattn.lab.page.numbers import binary, short
from linattn.lab.page.plots import Chart, Panel
from linattn.lab.page.style import Style


def charts_of(results: Mapping[str, Any]) -> list[Chart]:
    """The charts for which there are numbers, in reading order."""
    made = (
        _quality(results),
        _cost(results),
        transfer_chart(results.get("transfer") or []),
        _measured_freedom(results),
    )
    return [chart for chart in made if chart is not None]


def _quality(results: Mapping[str, Any]) -> Chart | None:
    stages = results.get("stages") or []
    panels = [
        curve_panel("Perplexity", "tokens of a window", _curves(stages, "perplexity", "length", "perplexity")),
        *_needle_panels(stages),
    ]
    reading = (
        "Left: lower is better; a converted model whose line rises where the teacher's does not forgets what is far "
        "away. Right: how often a number hidden in a long text is given back to the last digit."
    )
    if any(haystack_of(row) == TEXT for row in _needle_rows(stages)):
        reading += f" The text: {NOISE} is five sentences that repeat, {TEXT} ordinary text of those measured on."
    names = [stage["name"] for stage in stages]
    return _chart("quality", "Quality by length", reading, panels, names)


def _needle_panels(stages: Sequence[Mapping[str, Any]]) -> list[Panel | None]:
    """One panel per haystack."""
    panels = []
    for haystack, words in haystack_words(_needle_rows(stages)).items():
        own = [
            {"name": stage["name"], "rows": [row for row in _needle_rows([stage]) if haystack_of(row) == haystack]}
            for stage in stages
        ]
        curves = _curves(own, "rows", "length", "found", 100.0)
        panels.append(curve_panel(f"Needles found{words}, %", "tokens of the text", curves, limits=(-4, 104)))
    return panels


def _needle_rows(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for stage in stages for row in stage.get("needle_by_length") or []]


def _cost(results: Mapping[str, Any]) -> Chart | None:
    stages = _ends(results.get("stages") or [])
    panels = [
        curve_panel("Cache of one sequence", "tokens before", _curves(stages, "decoding", "context", "cache_bytes"),
                    shown=binary, log=2),
        curve_panel("Decoded tokens per second", "tokens before",
                    _curves(stages, "decoding", "context", "tokens_per_second"), shown=short),
    ]  # fmt: skip
    reading = (
        "Left: all that is kept of a sequence to go on from, over all layers; a flat line is a memory of fixed size. "
        "Right: higher is faster; one sequence at a time."
    )
    return _chart("cost", "Memory and speed of decoding", reading, panels, [stage["name"] for stage in stages])


def _ends(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The teacher and the last stage: the stages between them have the last one's shapes."""
    return [stages[0], stages[-1]] if len(stages) > 1 else list(stages)


def transfer_chart(layers: Sequence[Mapping[str, Any]]) -> Chart | None:
    if not layers:
        return None
    names = ("before", "after")
    curves: Curves = {
        f"{name} transfer": [(layer["layer"], layer[name]) for layer in layers if isinstance(layer[name], float)]
        for name in names
    }
    panel = curve_panel("Missed share of the output", "layer", curves, log=10, integer=True)
    losses: Curves = {}
    for layer in _some(layers):
        every = max(1, len(layer["losses"]) // 60)
        losses[f"layer {layer['layer']}"] = [(float(i), loss) for i, loss in enumerate(layer["losses"])][::every]
    look = stage_styles([*curves, *losses])
    panels = [panel, curve_panel("Loss of some layers", "step", losses, log=10, integer=True, look=look)]
    reading = (
        "Left: how much of the softmax output each layer misses, before and after it was taught; layers learn "
        "independently. Right: the loss on the way, of layers from the first to the last."
    )
    return _chart("transfer", "What each layer learned", reading, panels, [*curves, *losses], look)


def freedom_chart(degrees: Mapping[int, Sequence[float]], dims: Mapping[int, int]) -> Chart | None:
    """Degrees of freedom of the heads, and the features allocated to each layer."""
    freedom: Curves = {
        "mean head": [(float(layer), mean(heads)) for layer, heads in degrees.items()],
        "widest head": [(float(layer), max(heads)) for layer, heads in degrees.items()],
    }
    given: Curves = {"dimension": [(float(layer), float(dim)) for layer, dim in dims.items()]}
    look = stage_styles([*freedom, *given])
    panels = [
        curve_panel("Degrees of freedom", "layer", freedom, integer=True, look=look),
        curve_panel("Dimension at equal cost", "layer", given, integer=True, look=look),
    ]
    reading = (
        "Left: degrees of freedom of the layer's heads. Right: the same total split between layers by the widest head."
    )
    return _chart("freedom", "How many features it takes", reading, panels, list(look), look)


def _measured_freedom(results: Mapping[str, Any]) -> Chart | None:
    """The chart of a conversion whose dimensions were chosen by degrees of freedom."""
    measured = (results.get("degrees") or {}).get("layers") or []
    plans = (results.get("plan") or {}).get("layers") or {}
    dims = {int(layer): plan["feature_dim"] for layer, plan in plans.items() if plan.get("feature_dim")}
    return freedom_chart({each["layer"]: each["degrees"] for each in measured}, dims) if measured else None


def _some(layers: Sequence[Mapping[str, Any]], count: int = 4) -> list[Mapping[str, Any]]:
    learned = [layer for layer in layers if len(layer.get("losses") or []) > 1]
    if len(learned) <= count:
        return learned
    return [learned[round(i * (len(learned) - 1) / (count - 1))] for i in range(count)]


def _curves(stages: Sequence[Mapping[str, Any]], field: str, x: str, y: str, factor: float = 1.0) -> Curves:
    return {
        stage["name"]: [(row[x], factor * row[y]) for row in stage[field] if isinstance(row[y], int | float)]
        for stage in stages
        if stage.get(field)
    }


def _chart(
    name: str, title: str, reading: str, panels: Sequence[Panel | None], names: Sequence[str],
    look: dict[str, Style] | None = None,
) -> Chart | None:  # fmt: skip
    found = [panel for panel in panels if panel is not None]
    return Chart(name, title, reading, found, look or stage_styles(names)) if found else None
