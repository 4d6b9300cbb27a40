"""Charts with a line for each stage of a conversion, or for whatever else is named."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import Any

from linattn.lab.page import Section
from linattn.lab.page.numbers import binary, short
from linattn.lab.page.plots import INK, REFERENCE, Chart, Panel, Style, plot_line, styles

TEACHER = "teacher"
STEEP = 4.0  # an axis is logarithmic if its largest value is at least this many times the smallest
FEW = 9  # up to so many places each get a tick
Curves = dict[str, list[tuple[float, float]]]


def chart(name: str, title: str, reading: str, *panels: tuple[str, str, Curves, dict[str, Any]]) -> list[Section]:
    """A section with a chart of panels ``(title, label of the places, curves, options)``, of those that have a line to
    draw: finite points at several places. Empty if there is none. The teacher looks as softmax does on other pages.

    Options: ``shown``, which formats numbers beside the axis; ``log``, the base of a logarithmic axis, used if the
    values differ enough; ``limits`` of the values; ``dotted``: lines drawn dotted on top, without a name.
    """
    drawn = []
    for heading, label, curves, options in panels:
        finite = {curve: kept for curve, points in curves.items() if (kept := [p for p in points if isfinite(p[1])])}
        if len({x for points in finite.values() for x, _ in points}) > 1:
            drawn.append((heading, label, finite, options))
    names = dict.fromkeys(curve for _, _, curves, _ in drawn for curve in curves)
    look = styles([REFERENCE, *(curve for curve in names if curve != TEACHER)])
    look = {curve: look[REFERENCE if curve == TEACHER else curve] for curve in names}
    made = []
    for heading, label, curves, options in drawn:
        shown = options.get("shown", short)
        ends = "; ".join(f"{curve} {shown(points[0][1])} to {shown(points[-1][1])}" for curve, points in curves.items())
        draw = partial(_draw, title=heading, label=label, curves=curves, look=look, **options)
        made.append(Panel(draw, f"{heading}, from left to right: {ends}.", left=0.72 if shown is binary else 0.56))
    return [Section(title, chart=Chart(name, title, reading, made, look))] if made else []


def _draw(
    axes: Any, *, title: str, label: str, curves: Curves, look: dict[str, Style], shown: Callable[[float], str] = short,
    log: int | None = None, limits: tuple[float, float] | None = None,
    dotted: Sequence[Sequence[tuple[float, float]]] = (),
) -> None:  # fmt: skip
    from matplotlib import ticker

    places = sorted({x for points in curves.values() for x, _ in points})
    values = [y for points in curves.values() for _, y in points]
    for name, points in curves.items():
        plot_line(axes, [x for x, _ in points], [y for _, y in points], look[name], max(1, len(points) // 12))
    for line in dotted:  # in ink: where it lies on another line, both stay visible
        axes.plot(*zip(*line, strict=True), color=INK, linestyle=":", linewidth=1.8, zorder=4)
    if log and min(values) > 0 and max(values) > STEEP * min(values):
        axes.set_yscale("log", base=log)
        subs = (1.0, 2.0, 5.0) if log == 10 else (1.0,)
        axes.yaxis.set_major_locator(ticker.LogLocator(base=log, subs=subs, numticks=8))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    elif limits:
        axes.set_ylim(*limits)
    else:
        axes.set_ylim(bottom=0 if min(values) >= 0 else None)
        if shown is binary:
            axes.yaxis.set_major_locator(ticker.MultipleLocator(2 ** (int(max(values)).bit_length() - 3)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: shown(value)))
    if places[0] > 0:
        axes.set_xscale("log", base=2)
        if len(places) <= FEW:
            axes.xaxis.set_major_locator(ticker.FixedLocator(places))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.{6 if value >= 100 else 3}g}"))
    axes.set_title(title)
    axes.set_xlabel(label)
