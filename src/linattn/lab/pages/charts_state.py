"""Chart of the metric against the size of the state: one line per mechanism, one point per width of the host."""

from functools import partial
from typing import Any

from linattn.lab.page.numbers import binary
from linattn.lab.page.plots import Chart, Panel, plot_line
from linattn.lab.page.style import Style, styles
from linattn.lab.pages.charts_speed import Points, points_of
from linattn.lab.pages.read import Comparison

LABEL = 0.34  # inches at the right, for half of a tick's label at the end of the axis


def state_chart(comparison: Comparison) -> Chart | None:
    """The chart, or None where no states were measured, which only models of text have."""
    points = points_of(comparison, "state_bytes")
    if not points:
        return None
    metric = comparison.metric
    lines: dict[str, list[str]] = {_series(comparison, name): [] for name in comparison.names if name in points}
    for name in sorted(points, key=lambda name: points[name][0]):
        lines[_series(comparison, name)].append(name)
    look = styles(list(lines))
    alt = "; ".join(f"{name} {metric.text(a.mean)} at {binary(x)}" for name, (x, a) in points.items())
    name = f"{metric.name[0].upper()}{metric.name[1:]}"
    draw = partial(_draw, comparison=comparison, points=points, lines=lines, look=look)
    reading = (
        f"{'Up' if metric.higher else 'Down'} is more accurate, left remembers in less: all that is kept of a sequence "
        "to go on from, over all layers. Each point is a mean over seeds, its bar goes from the lowest seed to the "
        "highest; a line joins the widths of the host. The state of softmax grows with the sequence."
    )
    panel = Panel(draw, f"{name} against the state of a sequence: {alt}.", height=3.6, right=LABEL)
    return Chart("accuracy-state", f"{name} against state", reading, [panel], look)


def _series(comparison: Comparison, name: str) -> str:
    return str(comparison.entry(name).get("series") or name)


def _draw(
    axes: Any, *, comparison: Comparison, points: Points, lines: dict[str, list[str]], look: dict[str, Style]
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for series, names in lines.items():
        own = [points[name] for name in names]
        plot_line(axes, [x for x, _ in own], [accuracy.mean for _, accuracy in own], look[series])
        for x, accuracy in own:
            axes.plot([x, x], [accuracy.low, accuracy.high], color=look[series].color, linewidth=1.2, zorder=1)
    axes.set_xscale("log", base=2)
    sizes = [x for x, _ in points.values()]
    axes.set_xlim(min(sizes) / 1.4, max(sizes) * 1.4)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: binary(value)))
    axes.set_title(comparison.metric.title)
    axes.set_xlabel("state of one sequence")
