"""The chart over image sizes: time and memory of each model relative to its twin with softmax."""

from pathlib import Path
from typing import Any

from linattn.lab.bench.chart import COLORS, MARKERS
from linattn.lab.bench.models.cases import GROUP_MODELS, SOFTMAX
from linattn.lab.bench.models.rows import ModelsResult
from linattn.lab.bench.models.steps import MODES
from linattn.support.extras import need
from linattn.support.files import write_atomically

Points = list[tuple[int, float]]
MOST_LINES = 14


def draw_sweep(result: ModelsResult, path: Path) -> bool:
    """Write the chart as a PNG; False, and no file, if no model has a twin to be compared with."""
    mode = sweep_mode(result)
    if mode is None:
        return False
    figure = sweep_figure(result, mode)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=130))
    return True


def sweep_mode(result: ModelsResult) -> str | None:
    """The first mode in which a model was measured beside its twin."""
    return next((mode for mode in MODES if sweep_points(result, mode)), None)


def sweep_points(result: ModelsResult, mode: str) -> dict[str, tuple[Points, Points]]:
    """By model and mechanism: pixels with time over softmax, and pixels with peak memory over softmax."""
    found: dict[str, tuple[Points, Points]] = {}
    for row in result.rows:
        model, _, pixels = row.case.rpartition("-")
        share = result.over_softmax(row)
        if row.unit != "images" or row.mechanism == SOFTMAX or (row.mode, row.status) != (mode, "ok") or share is None:
            continue
        times, peaks = found.setdefault(f"{model}, {row.mechanism}", ([], []))
        times.append((int(pixels), share))
        memory = result.memory_over_softmax(row)
        if memory is not None:
            peaks.append((int(pixels), memory))
    return found


def shown_points(points: dict[str, tuple[Points, Points]]) -> dict[str, tuple[Points, Points]]:
    """All points or, of more models than can be told apart, those of the smallest in every family."""
    smallest = {name: own for name, own in points.items() if name.partition(",")[0] in GROUP_MODELS}
    return smallest if len(points) > MOST_LINES and smallest else points


def sweep_figure(result: ModelsResult, mode: str) -> Any:
    """Time on the left, memory on the right, a line per model; below 1 it is better than softmax."""
    need("a chart", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.2, 5.4), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    panels = figure.subplots(1, 2)
    every = sweep_points(result, mode)
    points = shown_points(every)
    for i, (name, both) in enumerate(points.items()):
        # Colors repeat before markers do: together they distinguish twice as many lines.
        style = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[(i + i // len(COLORS)) % len(MARKERS)]}
        for panel, own in zip(panels, both, strict=True):
            if own:
                panel.plot(*zip(*sorted(own), strict=True), label=name, **style)
    sizes = sorted({pixels for times, _ in points.values() for pixels, _ in times})
    for panel, title in zip(panels, ("time of a step", "peak memory of a step"), strict=True):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set(title=title, xlabel="pixels", ylabel="over the same model on softmax")
        panel.axhline(1, color="#999999", linestyle=":", linewidth=1)
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)  # no line below it
    meta, some = result.meta, f", the smallest of {len(every)} models" if len(points) < len(every) else ""
    figure.suptitle(f"forward + backward, {mode}, {meta['precision']}, {meta['device']}{some}", fontsize=10)
    return figure
