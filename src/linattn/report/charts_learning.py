"""Learning curves: mean over seeds, with a band from the lowest seed to the highest."""

from functools import partial
from typing import Any

from linattn.report.numbers import percent
from linattn.report.panel import Chart, Panel, plot_line
from linattn.report.read import Comparison, number
from linattn.report.style import Style, styles

SETTLED = 0.5  # what comes before is below the frame: the rise would flatten all that follows

Curve = list[tuple[int, float, float, float]]  # epoch, mean, lowest, highest


def learning_chart(comparison: Comparison) -> Chart | None:
    accuracy = {name: curve for name in comparison.names if (curve := seed_curve(comparison, name, "top1"))}
    loss = {name: curve for name in comparison.names if (curve := seed_curve(comparison, name, "train_loss"))}
    if not accuracy and not loss:
        return None
    look = styles(comparison.names)
    panels = []
    if accuracy:
        ends = "; ".join(f"{name} ends at {percent(curve[-1][1])}" for name, curve in accuracy.items())
        draw = partial(_draw, curves=accuracy, look=look, title="Top-1 on the test data, %", zoom=True)
        panels.append(Panel(draw, f"Test accuracy per epoch: {ends}."))
    if loss:
        ends = "; ".join(f"{name} ends at {curve[-1][1]:.3f}" for name, curve in loss.items())
        panels.append(Panel(partial(_draw, curves=loss, look=look, title="Training loss"), f"Loss per epoch: {ends}."))
    reading = (
        "How each mechanism learns: the line is the mean over seeds, the band goes from the lowest seed to the "
        "highest. The accuracy axis is chosen for the second half of training, the rise before it is cut off; the "
        "table has the numbers of the last epoch, never of the best one."
    )
    return Chart("learning-curves", "Learning curves", reading, panels, {n: look[n] for n in {**accuracy, **loss}})


def seed_curve(comparison: Comparison, name: str, field: str) -> Curve:
    """Over the finished runs, or over what there is so far where none has finished."""
    rows = comparison.runs(name, "done") or comparison.runs(name, "waiting")
    found: dict[int, list[float]] = {}
    for row in rows:
        for record in row.get("epochs") or []:
            value = number(record.get(field))
            if value is not None:
                found.setdefault(int(record["epoch"]), []).append(value)
    first = min(found, default=1)
    shift = 1 if first == 0 else 0  # shown as the number of epochs trained
    return [(epoch + shift, sum(v) / len(v), min(v), max(v)) for epoch, v in sorted(found.items())]


def _draw(axes: Any, *, curves: dict[str, Curve], look: dict[str, Style], title: str, zoom: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, curve in curves.items():
        epochs, means, lows, highs = map(list, zip(*curve, strict=True))
        axes.fill_between(epochs, lows, highs, color=look[name].color, alpha=0.15, linewidth=0)
        plot_line(axes, epochs, means, look[name], every=max(len(epochs) // 8, 1))
    axes.set_title(title)
    axes.set_xlabel("epochs trained")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if zoom:
        last = max(curve[-1][0] for curve in curves.values())
        lows = [low for curve in curves.values() for epoch, _, low, _ in curve if epoch >= SETTLED * last]
        highs = [high for curve in curves.values() for *_, high in curve]
        if lows and max(highs) > min(lows):
            room = (max(highs) - min(lows)) * 0.05
            axes.set_ylim(min(lows) - room, max(highs) + room)
