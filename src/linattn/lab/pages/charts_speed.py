"""Charts of accuracy against speed: one point per mechanism, one panel for forward and one for training."""

from functools import partial
from typing import Any

from linattn.lab.page.numbers import short
from linattn.lab.page.plots import Chart, Panel
from linattn.lab.page.style import styles
from linattn.lab.pages.labels import Box, draw_labels
from linattn.lab.pages.read import Accuracy, Comparison

PASSES = {False: "forward", True: "training"}
LOG_FROM = 4.0  # the axis is logarithmic if the fastest is this many times as fast as the slowest

Points = dict[str, tuple[float, Accuracy]]


def speed_chart(comparison: Comparison) -> Chart | None:
    panels, metric, unit = [], comparison.metric, comparison.words.unit
    for training, title in PASSES.items():
        points = points_of(comparison, comparison.words.speed(training))
        if points:
            alt = "; ".join(f"{name} {metric.text(a.mean)} at {short(x)} {unit}/s" for name, (x, a) in points.items())
            alt = f"{metric.name[0].upper()}{metric.name[1:]} against {unit} per second, {title}: {alt}."
            label = f"{unit} per second, {title}"
            draw = partial(draw_points, comparison=comparison, points=points, title=title, label=label)
            panels.append(Panel(draw, alt))
    if not panels:
        return None
    reading = (
        f"{'Up' if metric.higher else 'Down'} is more accurate, right is faster. Each point is a mean over seeds, its "
        "bar goes from the lowest seed to the highest: where bars overlap in height, the order of two mechanisms may "
        "be chance."
    )
    title = "Accuracy" if comparison.words.unit == "images" else metric.name[0].upper() + metric.name[1:]
    return Chart("accuracy-speed", f"{title} against speed", reading, panels)


def points_of(comparison: Comparison, field: str) -> Points:
    """Points of the mechanisms that have both the field and a score."""
    found = {}
    for name in comparison.names:
        speed, accuracy = comparison.value(name, field), comparison.accuracy(name)
        if speed and accuracy is not None:
            found[name] = (speed, accuracy)
    return found


def draw_points(axes: Any, *, comparison: Comparison, points: Points, title: str, label: str) -> None:
    """Draw scores against ``label``, each with its spread and its name."""
    look = styles(comparison.names)
    for name, (x, accuracy) in points.items():
        axes.errorbar(
            x,
            accuracy.mean,
            [[accuracy.mean - accuracy.low], [accuracy.high - accuracy.mean]],
            color=look[name].color,
            marker=look[name].marker,
            markerfacecolor=look[name].face,
            markersize=7.5 if look[name].emphasised else 6.5,
            elinewidth=1.2,
            capsize=2.5,
        )
    _limits(axes, points)
    axes.set_title(f"{comparison.metric.title}: {title}")
    axes.set_xlabel(label)
    bars = []
    for x, accuracy in points.values():
        left, bottom = axes.transData.transform((x, accuracy.low))
        _, top = axes.transData.transform((x, accuracy.high))
        bars.append(Box(left - 2.5, bottom, left + 2.5, top))
    places = [(x, accuracy.mean) for x, accuracy in points.values()]
    draw_labels(axes, list(points), places, bars, {name for name in points if comparison.is_reference(name)})


def _limits(axes: Any, points: Points) -> None:
    """Leave room for labels on all sides, with plain numbers as ticks even on a logarithmic axis."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    speeds = [x for x, _ in points.values()]
    low, high = min(a.low for _, a in points.values()), max(a.high for _, a in points.values())
    room = max((high - low) * 0.12, 0.05 if high > 2 else 0.005)
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
