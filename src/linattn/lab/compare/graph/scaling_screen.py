"""Measures the cost of graph models with output for users: a line for each row, files, and an exit code."""

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from linattn.lab.compare.compare import FAILED, INTERRUPTED, RIGHT
from linattn.lab.compare.graph.scaling import ScalingConfig, ScalingResult, ScalingRow, measure_scaling
from linattn.lab.page.markup import Markup, element
from linattn.lab.page.numbers import MISSING, binary, short
from linattn.lab.page.plots import Chart, Panel, plot_line
from linattn.lab.page.style import Style, styles
from linattn.lab.pages.frame import chart_section, document, made_section, table_section, write_page
from linattn.lab.pages.table import Cell, Column, table
from linattn.support.extras import need
from linattn.support.files import write_json


def scaling_on_screen(config: ScalingConfig, path: Path, chart: bool, console: Console) -> int:
    """Measure, write ``path`` (JSON) after every row, then the chart. Returns 1 if a row is WRONG, 130 after Ctrl-C."""
    if chart:
        need("a chart", "matplotlib")

    def on_row(result: ScalingResult) -> None:
        write_json(path, result.as_json())
        console.print(row_words(result.rows[-1]), soft_wrap=True)

    try:
        result = measure_scaling(config, on_row)
    except KeyboardInterrupt:
        console.print(f"Interrupted; finished rows are kept: {path}", soft_wrap=True)
        return INTERRUPTED
    for words in filter(None, map(result.words, result.models)):
        console.print(words, soft_wrap=True, highlight=False)
    if chart and any(row.median_ms is not None for row in result.rows):
        for written in write_scaling_page(result, path):
            console.print(f"{'chart:  ' if written.suffix == '.png' else 'page:   '} {written}", soft_wrap=True)
    console.print(f"results: {path}", soft_wrap=True)
    return FAILED if any(row.status == "WRONG" for row in result.rows) else RIGHT


def write_scaling_page(result: ScalingResult, path: Path) -> list[Path]:
    """Write the chart as a PNG, and a page with it and all numbers, beside ``path``."""
    chart, title = scaling_chart(result), "Graph models: cost against nodes"
    lead = "Forward, loss, backward and Adam on a whole generated graph, 8 edges a node on average."
    text = document(
        title,
        element("header", element("h1", title), element("p", lead, class_="lead")),
        chart_section(chart),
        _numbers(result),
        made_section(result.meta),
    )
    return write_page(path.with_suffix(".html"), text, {path.with_suffix(".png").name: chart})


def _numbers(result: ScalingResult) -> Markup:
    names = [row.model for row in result.rows]
    columns = []
    for title, unit, name, show in (
        ("nodes", "", "nodes", "{:,}".format),
        ("edges", "", "edges", "{:,}".format),
        ("time", "ms", "median_ms", "{:,.1f}".format),
        ("peak memory", "", "peak_bytes", binary),
        ("error", "of the largest logit", "error", "{:.1e}".format),
        ("status", "", "status", str),
    ):
        values = [getattr(row, name) for row in result.rows]
        cells = [Cell(MISSING) if value is None else Cell(show(value), value) for value in values]
        columns.append(Column(title, unit, cells))
    words = ". ".join(filter(None, map(result.words, result.models))) or "One size alone was measured"
    reading = f"{words}. Error: of fp32 against fp64. Memory: of a step, beside graph and weights."
    return table_section("Every number", "numbers", table("Cost", "model", names, names, columns), reading)


def row_words(row: ScalingRow) -> str:
    head = f"{row.model}, {row.nodes:,} nodes: "
    if row.median_ms is None or row.peak_bytes is None or row.error is None:
        return head + row.status
    wrong = "" if row.status == "ok" else f", {row.status}"
    return head + f"{row.median_ms:,.1f} ms, {binary(row.peak_bytes)}, error {row.error:.1e}{wrong}"


def scaling_chart(result: ScalingResult) -> Chart:
    """A chart of two panels with logarithmic axes: time and memory against nodes."""
    look = styles(list(dict.fromkeys(row.model for row in result.rows)))
    panels = [
        Panel(partial(_draw, result=result, look=look, name=name, title=title), f"{title} against nodes", left=0.7)
        for name, title in (("median_ms", "Time of a training step, ms"), ("peak_bytes", "Peak memory of it, MiB"))
    ]
    reading = "Both axes are logarithmic: a line that rises by one decade a decade is linear in the number of nodes."
    return Chart("graph-scaling", "Cost of a training step", reading, panels, look)


def _draw(axes: Any, *, result: ScalingResult, look: dict[str, Style], name: str, title: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    factor = 2**20 if name == "peak_bytes" else 1
    for model, style in look.items():
        rows = [row for row in result.rows if row.model == model and getattr(row, name) is not None]
        plot_line(axes, [row.nodes for row in rows], [getattr(row, name) / factor for row in rows], style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))  # powers would be in TeX
    sizes = sorted({row.nodes for row in result.rows})
    axes.set_xticks(sizes, [short(size) for size in sizes])
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_xlabel("nodes")
