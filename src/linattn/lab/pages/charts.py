"""All charts of a comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linattn.lab.page.plots import Chart, save_png
from linattn.lab.pages.charts_cost import cost_chart
from linattn.lab.pages.charts_layers import entropy_chart
from linattn.lab.pages.charts_learning import learning_chart
from linattn.lab.pages.charts_maps import map_names, save_map_png
from linattn.lab.pages.charts_speed import speed_chart
from linattn.lab.pages.charts_state import state_chart
from linattn.lab.pages.read import Comparison, load_examples
from linattn.support.extras import need


def charts_of(comparison: Comparison) -> list[Chart]:
    """The charts for which there are numbers, in reading order."""
    found = (make(comparison) for make in (state_chart, speed_chart, learning_chart, entropy_chart, cost_chart))
    return [chart for chart in found if chart is not None]


def write_charts(folder: Path, results: Mapping[str, Any]) -> list[Path]:
    """Write the charts as PNG files into ``folder/charts``; attention maps if ``folder`` has an ``examples.json``."""
    need("the report's charts", "matplotlib")
    comparison = Comparison(results)
    written = []
    for chart in charts_of(comparison):
        written.append(folder / "charts" / f"{chart.name}.png")
        save_png(chart, written[-1])
    examples = load_examples(folder)
    if examples and map_names(comparison.names, examples):
        written.append(folder / "charts" / "attention-maps.png")
        save_map_png(comparison.names, examples, written[-1])
    return written
