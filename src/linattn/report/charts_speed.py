"""Accuracy against speed: one point a mechanism, one panel forward and one training."""

from functools import partial
from typing import Any

from linattn.report.labels import Box, draw_labels
from linattn.report.numbers import percent, short
from linattn.report.panel import Chart, Panel
from linattn.report.read import REFERENCE, Accuracy, Comparison
from linattn.report.style import styles

PASSES = {"images_per_second_forward": "forward", "images_per_second_train": "training"}
LOG_FROM = 4.0  # a logarithmic axis where the fastest is that many times as fast as the slowest

Points = dict[str, tuple[float, Accuracy]]


def speed_chart(comparison: Comparison) -> Chart | None:
    panels = []
    for field, title in PASSES.items():
        points = _points(comparison, field)
        if points:
            alt = "; ".join(f"{name} {percent(a.mean)} at {short(x)} images/s" for name, (x, a) in points.items())
            alt = f"Top-1 against images per second, {title}: {alt}."
            panels.append(Panel(partial(_draw, comparison=comparison, points=points, title=title), alt))
    if not panels:
        return None
    reading = (
        "Up is more accurate, right is faster. Each point is a mean over seeds, its bar goes from the lowest seed to "
        "the highest: where bars overlap in height, the order of two mechanisms may be chance."
    )
    return Chart("accuracy-speed", "Accuracy against speed", reading, panels)


def _points(comparison: Comparison, field: str) -> Points:
    found = {}
    for name in comparison.names:
        speed, accuracy = comparison.value(name, field), comparison.accuracy(name)
        if speed and accuracy is not None:
            found[name] = (speed, accuracy)
    return found


def _draw(axes: Any, *, comparison: Comparison, points: Points, title: str) -> None:
    look = styles(comparison.names)
    for name, (x, accuracy) in points.items():
        axes.errorbar(
            x,
            accuracy.mean,
            [[accuracy.mean - accuracy.low], [accuracy.high - accuracy.mean]],
            color=look[name].color,
            marker=look[name].marker,
            markersize=7.5 if look[name].emphasised else 6.5,
            elinewidth=1.2,
            capsize=2.5,
        )
    _limits(axes, points)
    axes.set_title(f"Top-1, %: {title}")
    axes.set_xlabel(f"images per second, {title}")
    bars = []
    for x, accuracy in points.values():
        left, bottom = axes.transData.transform((x, accuracy.low))
        _, top = axes.transData.transform((x, accuracy.high))
        bars.append(Box(left - 2.5, bottom, left + 2.5, top))
    places = [(x, accuracy.mean) for x, accuracy in points.values()]
    draw_labels(axes, list(points), places, bars, {REFERENCE})


def _limits(axes: Any, points: Points) -> None:
    """Room on all sides for labels; the ticks are plain numbers on a logarithmic axis too."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    speeds = [x for x, _ in points.values()]
    low, high = min(a.low for _, a in points.values()), max(a.high for _, a in points.values())
    room = max((high - low) * 0.12, 0.05)
    axes.set_ylim(low - room, high + room)
    slow, fast = min(speeds), max(speeds)
    if fast / slow > LOG_FROM:
        axes.set_xscale("log")
        margin = (fast / slow) ** 0.12
        axes.set_xlim(slow / margin, fast * margin)
        steps = [m * 10.0**e for e in range(-3, 12) for m in (1, 2, 5)]
        axes.xaxis.set_major_locator(FixedLocator([s for s in steps if slow / margin <= s <= fast * margin]))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        margin = max((fast - slow) * 0.15, fast * 0.05)
        axes.set_xlim(slow - margin, fast + margin)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
