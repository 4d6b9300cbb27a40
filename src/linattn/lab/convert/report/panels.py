"""Panels with a line for each stage of a conversion, or bars if there is a single place on the axis."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from linattn.lab.page.numbers import binary, short
from linattn.lab.page.plots import Panel, plot_line
from linattn.lab.page.style import INK, MUTED, REFERENCE, Style, styles

TEACHER = "teacher"
STEEP = 4.0  # an axis is logarithmic if its largest value is at least this many times the smallest
FEW = 9  # up to so many places each get a tick
Curves = dict[str, list[tuple[float, float]]]


def stage_styles(names: Sequence[str]) -> dict[str, Style]:
    """A style for each stage; the teacher looks as softmax does on all other pages."""
    look = styles([REFERENCE, *(name for name in names if name != TEACHER)])
    return {name: look[REFERENCE if name == TEACHER else name] for name in names}


def curve_panel(
    title: str,
    label: str,
    curves: Curves,
    *,
    shown: Callable[[float], str] = short,
    log: int | None = None,
    limits: tuple[float, float] | None = None,
    integer: bool = False,
    look: dict[str, Style] | None = None,
) -> Panel | None:
    """Lines over one axis, or bars for a single place; None if there are no points.

    Args:
        shown: formats the numbers beside the axis.
        log: base of a logarithmic axis, used if the values differ enough.
        integer: places are numbers of layers.
    """
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return None
    look = look or stage_styles(list(curves))
    places = sorted({x for points in curves.values() for x, _ in points})
    if len(places) == 1 and not integer:
        values = {name: points[0][1] for name, points in curves.items()}
        alt = "; ".join(f"{name} {shown(value)}" for name, value in values.items())
        draw = partial(_bars, title=title, label=f"at {places[0]:,g} {label}", values=values, look=look, shown=shown)
        longest = max(map(len, values))
        height, left = 0.95 + 0.26 * len(values), min(0.3 + 0.075 * longest, 1.5)
        return Panel(draw, f"{title} at {places[0]:,g} {label}: {alt}.", height=height, left=left)
    ends = "; ".join(f"{name} {shown(points[0][1])} to {shown(points[-1][1])}" for name, points in curves.items())
    lines = partial(_lines, title=title, label=label, curves=curves, look=look, shown=shown)
    return Panel(
        partial(lines, places=places, log=log, limits=limits, integer=integer),
        f"{title}, from left to right: {ends}.",
        left=0.72 if shown is binary else 0.56,
    )


def _lines(
    axes: Any, *, title: str, label: str, curves: Curves, look: dict[str, Style], shown: Callable[[float], str],
    places: list[float], log: int | None, limits: tuple[float, float] | None, integer: bool,
) -> None:  # fmt: skip
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullLocator

    for name, points in curves.items():
        plot_line(axes, [x for x, _ in points], [y for _, y in points], look[name], max(1, len(points) // 12))
    values = [y for points in curves.values() for _, y in points]
    if log and min(values) > 0 and max(values) > STEEP * min(values):
        axes.set_yscale("log", base=log)
        axes.yaxis.set_major_locator(LogLocator(base=log, subs=(1.0, 2.0, 5.0) if log == 10 else (1.0,), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    elif limits:
        axes.set_ylim(*limits)
    else:
        axes.set_ylim(bottom=0 if min(values) >= 0 else None)
        if shown is binary:
            axes.yaxis.set_major_locator(MultipleLocator(2 ** (int(max(values)).bit_length() - 3)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    if integer:
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    elif len(places) <= FEW and places[0] > 0:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title(title)
    axes.set_xlabel(label)


def _bars(
    axes: Any, *, title: str, label: str, values: dict[str, float], look: dict[str, Style],
    shown: Callable[[float], str],
) -> None:  # fmt: skip
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    highest = max(values.values()) or 1.0
    for y, (name, value) in enumerate(values.items()):
        axes.barh(y, value, 0.62, color=look[name].color, linewidth=0)
        axes.text(max(value, 0.0) + highest * 0.015, y, shown(value), va="center", color=MUTED, fontsize=8.5)
    axes.set_yticks(range(len(values)), list(values), color=INK)
    axes.set_ylim(len(values) - 0.45, -0.55)
    axes.set_xlim(0, highest * 1.2)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axes.set_title(title)
    axes.set_xlabel(label)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
