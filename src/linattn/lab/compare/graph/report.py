"""The page of a comparison of graph models: one HTML file that needs nothing else."""

from functools import partial
from json import dumps
from pathlib import Path
from statistics import mean
from typing import Any

from linattn.lab.page.markup import Markup, element
from linattn.lab.page.numbers import MISSING, counted
from linattn.lab.page.plots import Chart, Panel, key, plot_line
from linattn.lab.page.style import OUTLINES, Style, styles
from linattn.lab.pages.details import failures
from linattn.lab.pages.frame import chart_section, document, write_page
from linattn.lab.pages.read import Comparison, load_results
from linattn.lab.pages.setting import how_it_was_made
from linattn.lab.pages.table import Cell, Column, table
from linattn.support.extras import need


def write_graph_report(folder: Path) -> Path:
    """Write ``report.html`` and ``charts/*.png`` from ``results.json``; the same results give the same bytes."""
    need("the report's charts", "matplotlib")
    comparison = Comparison(load_results(folder))
    charts = [chart for chart in (scores_chart(comparison), learning_chart(comparison)) if chart is not None]
    data = comparison.part("data")
    task = "links" if data.get("task") == "links" else "classes of nodes"
    title = f"Graph models compared on {data.get('name') or 'unnamed data'}: {task}"
    seeds = counted(len(comparison.meta.get("seeds") or []), "seed")
    lead = (
        f"{data['nodes']:,} nodes, {data['edges']:,} edges, {data['features']:,} features; {seeds}, on "
        f"{comparison.meta.get('device')}. The epoch is chosen on validation data, test data is looked at once."
    )
    parts = [
        element("header", element("h1", title), element("p", lead, class_="lead")),
        _results(comparison),
        failures(comparison),
        *(chart_section(chart) for chart in charts),
        _settings(comparison),
        _grids(comparison),
        how_it_was_made(comparison),
    ]
    path = folder / "report.html"
    write_page(path, document(title, *parts), {f"charts/{chart.name}.png": chart for chart in charts})
    return path


def _heads(comparison: Comparison) -> list[str]:
    look = styles(comparison.names)
    return [key(name, look[name], OUTLINES[look[name].marker]) for name in comparison.names]


def _results(comparison: Comparison) -> Markup:
    """A table of scores with their spread, and the cost of a run."""
    metric, names = comparison.metric, comparison.names
    scores, ranges = [], []
    for name in names:
        found = comparison.accuracy(name)
        spread = "" if found is None or found.std is None else f" ± {metric.number(found.std)}"
        scores.append(Cell(MISSING) if found is None else Cell(f"{metric.number(found.mean)}{spread}", found.mean))
        ranges.append(
            Cell(MISSING) if found is None else Cell(f"{metric.number(found.low)}–{metric.number(found.high)}")
        )
    columns = [Column(metric.name, "%, mean ± std", scores), Column("range", "%", ranges)]
    for title, unit, name, factor, digits in (
        ("parameters", "thousand", "parameters", 1e3, 1),
        ("training", "s a run", "train_seconds_mean", 1.0, 1),
        ("peak memory", "MiB", "peak_bytes_train", 2.0**20, 1),
    ):
        values = [comparison.value(model, name) for model in names]
        cells = [Cell(MISSING) if v is None else Cell(f"{v / factor:,.{digits}f}", v) for v in values]
        columns.append(Column(title, unit, cells))
    body = table("Results", "model", _heads(comparison), names, columns)
    return element("section", element("h2", "Results"), body, id="results")


def scores_chart(comparison: Comparison) -> Chart | None:
    """A chart with every run of every model as a point, and the mean as a bar."""
    runs = {name: [row[comparison.metric.field] for row in comparison.runs(name, "done")] for name in comparison.names}
    runs = {name: found for name, found in runs.items() if found}
    if not runs:
        return None
    look, metric = styles(comparison.names), comparison.metric

    def draw(axes: Any) -> None:
        for y, (name, found) in enumerate(runs.items()):
            style = look[name]
            axes.plot(found, [y] * len(found), linestyle="none", marker=style.marker, color=style.color, markersize=5)
            axes.plot([mean(found)] * 2, [y - 0.3, y + 0.3], color=style.color, linewidth=2.2)
        axes.set_yticks(range(len(runs)), list(runs))
        axes.set_ylim(len(runs) - 0.4, -0.6)
        axes.set_title(f"{metric.title} on test data")

    alt = "; ".join(f"{name} {metric.text(mean(found))}" for name, found in runs.items())
    panel = Panel(draw, f"Scores of all runs, means: {alt}.", height=1.0 + 0.34 * len(runs), left=1.5)
    return Chart("scores", "Every run", "A point is one seed, the bar is the mean over seeds.", [panel])


def learning_chart(comparison: Comparison) -> Chart | None:
    """A chart of the validation score against epochs, mean over seeds."""
    look, lines = styles(comparison.names), {}
    for name in comparison.names:
        seen: dict[int, list[float]] = {}
        for row in comparison.runs(name, "done"):
            for record in row.get("epochs") or []:
                seen.setdefault(record["epoch"] + 1, []).append(record["val"])
        if seen:
            lines[name] = {epoch: mean(found) for epoch, found in sorted(seen.items())}
    if not lines:
        return None
    draw = partial(_draw_learning, lines=lines, look=look, title=f"{comparison.metric.title} on validation data")
    reading = "Mean over seeds. A run is tested with the weights of its best epoch here."
    used = {name: look[name] for name in lines}
    return Chart("learning", "Learning", reading, [Panel(draw, "Validation scores against epochs.")], used)


def _draw_learning(axes: Any, *, lines: dict[str, dict[int, float]], look: dict[str, Style], title: str) -> None:
    for name, line in lines.items():
        plot_line(axes, list(line), list(line.values()), look[name], every=max(1, len(line) // 8))
    axes.set_title(title)
    axes.set_xlabel("epoch")


def _settings(comparison: Comparison) -> Markup:
    """The settings of every model: those of its recipe, or those that the grid chose."""
    rows = []
    for name in comparison.names:
        entry = comparison.entry(name)
        said = {"hidden": entry.get("hidden"), **(entry.get("options") or {}), **(entry.get("train") or {})}
        said["lr"] = entry.get("lr")
        words = ", ".join(f"{option} {_shown(value)}" for option, value in said.items() if value is not None)
        rows.append(element("div", element("dt", name), element("dd", words)))
    return element("section", element("h2", "Settings of each model"), element("dl", *rows), id="settings")


def _grids(comparison: Comparison) -> Markup | None:
    """Every point of the grid with its validation score, the best of each model first."""
    names: list[str] = []
    columns: list[list[Cell]] = [[], [], [], []]
    for name in comparison.names:
        found = comparison.entry(name).get("grid") or []
        for tried in sorted(found, key=lambda t: -t["val"] if isinstance(t["val"], float) else 0.0):
            names.append(name)
            for column, option in zip(columns, ("lr", "weight_decay", "dropout", "val"), strict=True):
                value = tried[option]
                column.append(Cell(MISSING) if value is None else Cell(_shown(value), value))
    if not names:
        return None
    titles = ("learning rate", "weight decay", "dropout", "validation score")
    body = table("Grid", "model", names, names, [Column(t, "", c) for t, c in zip(titles, columns, strict=True)])
    text = element("p", "The same points for every model; validation data alone choose among them.", class_="reading")
    return element("section", element("h2", "What was tried"), body, text, id="grid")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else dumps(value)
