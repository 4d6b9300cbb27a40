"""Charts with a line for each stage of a conversion, or bars if there is a single place on the axis."""

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import mean
from typing import Any

from linattn.lab.page.numbers import binary, short
from linattn.lab.page.plots import INK, MUTED, REFERENCE, Chart, Panel, Style, plot_line, styles

TEACHER = "teacher"
STEEP = 4.0  # an axis is logarithmic if its largest value is at least this many times the smallest
FEW = 9  # up to so many places each get a tick
Curves = dict[str, list[tuple[float, float]]]


def stage_styles(names: Sequence[str]) -> dict[str, Style]:
    """A style for each stage; the teacher looks as softmax does on all other pages."""
    look = styles([REFERENCE, *(name for name in names if name != TEACHER)])
    return {name: look[REFERENCE if name == TEACHER else name] for name in names}


def chart(name: str, title: str, reading: str, *panels: tuple[str, str, Curves, dict[str, Any]]) -> Chart | None:
    """A chart of panels ``(title, label of the places, curves, options)``; None if no curve has a finite point.

    Options: ``shown``, which formats numbers beside the axis; ``log``, the base of a logarithmic axis, used if the
    values differ enough; ``limits`` of the values; ``integer``: places are numbers of layers or steps.
    """
    finite = [
        {curve: kept for curve, points in curves.items() if (kept := [point for point in points if isfinite(point[1])])}
        for _, _, curves, _ in panels
    ]
    look = stage_styles(list(dict.fromkeys(curve for curves in finite for curve in curves)))
    drawn = [
        _panel(title, label, curves, look, **options)
        for (title, label, _, options), curves in zip(panels, finite, strict=True)
        if curves
    ]
    return Chart(name, title, reading, drawn, look) if drawn else None


def _panel(
    title: str, label: str, curves: Curves, look: dict[str, Style], *, shown: Callable[[float], str] = short,
    log: int | None = None, limits: tuple[float, float] | None = None, integer: bool = False,
) -> Panel:  # fmt: skip
    places = sorted({x for points in curves.values() for x, _ in points})
    values = [y for points in curves.values() for _, y in points]

    def draw(axes: Any) -> None:
        from matplotlib import ticker

        for name, points in curves.items():
            plot_line(axes, [x for x, _ in points], [y for _, y in points], look[name], max(1, len(points) // 12))
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
        if integer:
            axes.xaxis.set_major_locator(ticker.MaxNLocator(12, integer=True))
        elif len(places) <= FEW and places[0] > 0:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(ticker.FixedLocator(places))
            axes.xaxis.set_minor_locator(ticker.NullLocator())
            axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_title(title)
        axes.set_xlabel(label)

    def draw_bars(axes: Any) -> None:
        from matplotlib import ticker

        highest = max(values) or 1.0
        for y, (name, points) in enumerate(curves.items()):
            value = points[0][1]
            axes.barh(y, value, 0.62, color=look[name].color, linewidth=0)
            axes.text(max(value, 0.0) + highest * 0.015, y, shown(value), va="center", color=MUTED, fontsize=8.5)
        axes.set_yticks(range(len(curves)), list(curves), color=INK)
        axes.set_ylim(len(curves) - 0.45, -0.55)
        axes.set_xlim(0, highest * 1.2)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: shown(value)))
        axes.set_title(title)
        axes.set_xlabel(f"at {places[0]:,g} {label}")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)

    if len(places) == 1 and not integer:
        alt = "; ".join(f"{name} {shown(points[0][1])}" for name, points in curves.items())
        left = min(0.3 + 0.075 * max(map(len, curves)), 1.5)
        return Panel(draw_bars, f"{title} at {places[0]:,g} {label}: {alt}.", 0.95 + 0.26 * len(curves), left)
    ends = "; ".join(f"{name} {shown(points[0][1])} to {shown(points[-1][1])}" for name, points in curves.items())
    return Panel(draw, f"{title}, from left to right: {ends}.", left=0.72 if shown is binary else 0.56)


def freedom_chart(degrees: dict[int, list[float]], dims: dict[int, int]) -> Chart | None:
    """Degrees of freedom of the heads of each layer, and the features that it got."""
    freedom: Curves = {
        "mean head": [(layer, mean(heads)) for layer, heads in degrees.items()],
        "widest head": [(layer, max(heads)) for layer, heads in degrees.items()],
    }
    return chart(
        "freedom", "How many features it takes",
        "Left: degrees of freedom of the layer's heads. Right: the same total split between layers by the widest head.",
        ("Degrees of freedom", "layer", freedom, {"integer": True}),
        ("Dimension at equal cost", "layer", {"dimension": list(dims.items())},
         {"integer": True}),
    )  # fmt: skip
