"""Learning curves: mean over seeds, with a band from the lowest seed to the highest."""

from functools import partial
from typing import Any

from linattn.lab.page.plots import Chart, Panel, plot_line
from linattn.lab.page.style import Style, styles
from linattn.lab.pages.read import Comparison, number

SETTLED = 0.5  # earlier values are below the frame: the first rise would flatten all that follows

WORDS = {"top-1": "accuracy"}

Curve = list[tuple[int, float, float, float]]  # epoch, mean, lowest, highest


def learning_chart(comparison: Comparison) -> Chart | None:
    metric, count = comparison.metric, comparison.words.round
    accuracy = {name: curve for name in comparison.names if (curve := seed_curve(comparison, name, metric.field))}
    loss = {name: curve for name in comparison.names if (curve := seed_curve(comparison, name, "train_loss"))}
    if not accuracy and not loss:
        return None
    look = styles(comparison.names)
    panels = []
    axis, way = f"{count}s trained", "rise" if metric.higher else "fall"
    if accuracy:
        ends = "; ".join(f"{name} ends at {metric.text(curve[-1][1])}" for name, curve in accuracy.items())
        title = f"{metric.title.split(',')[0]} on the test data{', ' + metric.unit if metric.unit else ''}"
        draw = partial(_draw, curves=accuracy, look=look, title=title, axis=axis, zoom=way)
        panels.append(Panel(draw, f"Test {WORDS.get(metric.name, metric.name)} per {count}: {ends}."))
    if loss:
        ends = "; ".join(f"{name} ends at {curve[-1][1]:.3f}" for name, curve in loss.items())
        draw = partial(_draw, curves=loss, look=look, title="Training loss", axis=axis)
        panels.append(Panel(draw, f"Loss per {count}: {ends}."))
    reading = (
        "How each mechanism learns: the line is the mean over seeds, the band goes from the lowest seed to the "
        f"highest. The {WORDS.get(metric.name, metric.name)} axis is chosen for the second half of training, the "
        f"{way} before it is cut off; the table has the numbers of the last {count}, "
        "never of the best one."
    )
    return Chart("learning-curves", "Learning curves", reading, panels, {n: look[n] for n in {**accuracy, **loss}})


def seed_curve(comparison: Comparison, name: str, field: str) -> Curve:
    """The curve over the finished runs, or over what there is so far if none has finished."""
    rows = comparison.runs(name, "done") or comparison.runs(name, "waiting")
    found: dict[int, list[float]] = {}
    for row in rows:
        for record in row.get("epochs") or []:
            value = number(record.get(field))
            if value is not None:
                found.setdefault(int(record[comparison.words.round]), []).append(value)
    first = min(found, default=1)
    shift = 1 if first == 0 else 0  # epochs are shown as the number of epochs trained
    return [(epoch + shift, sum(v) / len(v), min(v), max(v)) for epoch, v in sorted(found.items())]


def _draw(
    axes: Any, *, curves: dict[str, Curve], look: dict[str, Style], title: str, axis: str, zoom: str = ""
) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, curve in curves.items():
        epochs, means, lows, highs = map(list, zip(*curve, strict=True))
        axes.fill_between(epochs, lows, highs, color=look[name].color, alpha=0.15, linewidth=0)
        plot_line(axes, epochs, means, look[name], every=max(len(epochs) // 8, 1))
    axes.set_title(title)
    axes.set_xlabel(axis)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if zoom:
        last = max(curve[-1][0] for curve in curves.values())
        points = [point for curve in curves.values() for point in curve]
        late = [point for point in points if point[0] >= SETTLED * last]
        lows = [low for _, _, low, _ in (late if zoom == "rise" else points)]
        highs = [high for *_, high in (points if zoom == "rise" else late)]
        if lows and max(highs) > min(lows):
            room = (max(highs) - min(lows)) * 0.05
            axes.set_ylim(min(lows) - room, max(highs) + room)
