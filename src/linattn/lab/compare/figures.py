"""The charts of a comparison: score against speed and state, learning, entropy by layer, memory and operations."""

from functools import partial
from math import log
from statistics import fmean
from typing import Any

from linattn.lab.compare.findings import MIB, Findings
from linattn.lab.page.numbers import BINARY, PREFIXES, Unit, binary, common_unit, short
from linattn.lab.page.plots import Chart, Panel, plot_line
from linattn.lab.page.style import INK, MUTED, Style, styles

LOG_FROM = 4.0  # the axis is logarithmic if the fastest is this many times as fast as the slowest
NEAR = 0.6  # the entropy of even attention is drawn if the lines come this near to it
SETTLED = 0.5  # scores of the first half are below the frame: the first rise would flatten all that follows
Curve = list[tuple[float, float, float, float]]  # x, mean, lowest, highest


def charts_of(findings: Findings) -> list[Chart]:
    """The charts for which there are numbers, in reading order."""
    found = (make(findings) for make in (state_chart, speed_chart, learning_chart, entropy_chart, cost_chart))
    return [chart for chart in found if chart is not None]


def speed_chart(findings: Findings) -> Chart | None:
    """Score against speed, a point for each mechanism, with the spread of both."""
    metric, look, panels = findings.metric, styles(findings.names), []
    shown: set[str] = set()
    for way, title in (("forward", "forward"), ("train", "training")):
        points = {
            name: (speed, row)
            for name in findings.names
            if (speed := findings.speed(name, way)) and (row := findings.score(name))
        }
        if not points:
            continue
        shown |= points.keys()
        label = f"{metric.counted}s per second, {title}"
        alt = "; ".join(f"{name} {metric.text(row.mean)} at {short(x[0])}" for name, (x, row) in points.items())
        panels.append(
            Panel(
                partial(_draw_points, points=points, look=look, title=metric.title, label=label),
                f"{metric.title} against {label}: {alt}.",
            )
        )
    if not panels:
        return None
    reading = (
        f"{'Up' if metric.higher else 'Down'} is more accurate, right is faster. Each point is a mean over seeds and "
        "the median speed; bars go from the lowest to the highest of both. Seeds are compared in pairs by the table, "
        "which these bars do not show."
    )
    legend = {name: look[name] for name in findings.names if name in shown}
    return Chart("accuracy-speed", f"{metric.name[0].upper()}{metric.name[1:]} against speed", reading, panels, legend)


def _draw_points(axes: Any, *, points: dict[str, Any], look: dict[str, Style], title: str, label: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    for name, ((x, slow, fast), row) in points.items():
        axes.errorbar(
            x, row.mean, [[row.mean - row.least], [row.greatest - row.mean]], [[x - slow], [fast - x]],
            color=look[name].color, marker=look[name].marker, markerfacecolor=look[name].face,
            markersize=7.5 if look[name].emphasised else 6.5, elinewidth=1.2, capsize=2.5,
        )  # fmt: skip
    slow, fast = min(x[1] for x, _ in points.values()), max(x[2] for x, _ in points.values())
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
    axes.set_title(title)
    axes.set_xlabel(label)


def state_chart(findings: Findings) -> Chart | None:
    """Score against the bytes kept of a sequence, a line through the widths of each host; only for sequences."""
    metric = findings.metric
    points = {
        name: (size, row)
        for name in findings.names
        if (size := findings.field(name, "state_bytes")) and (row := findings.score(name))
    }
    if not points:
        return None
    lines: dict[str, list[str]] = {}
    for name in sorted(points, key=lambda name: points[name][0]):
        lines.setdefault(str(findings.field(name, "series") or name), []).append(name)
    look = styles([series for name in findings.names for series in lines if name in lines[series][:1]])
    alt = "; ".join(f"{name} {metric.text(row.mean)} at {binary(x)}" for name, (x, row) in points.items())
    reading = (
        f"{'Up' if metric.higher else 'Down'} is more accurate, left remembers in less: all that is kept of a sequence "
        "to go on from, over all layers. Each point is a mean over seeds, its bar goes from the lowest seed to the "
        "highest; a line joins the widths of the host. The state of softmax grows with the sequence."
    )
    draw = partial(_draw_states, points=points, lines=lines, look=look, title=metric.title)
    panel = Panel(draw, f"{metric.title} against the state of a sequence: {alt}.", height=3.6, right=0.34)
    return Chart("accuracy-state", f"{metric.name[0].upper()}{metric.name[1:]} against state", reading, [panel], look)


def _draw_states(
    axes: Any, *, points: dict[str, Any], lines: dict[str, list[str]], look: dict[str, Style], title: str
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for series, names in lines.items():
        found = [points[name] for name in names]
        plot_line(axes, [x for x, _ in found], [row.mean for _, row in found], look[series])
        for x, row in found:
            axes.plot([x, x], [row.least, row.greatest], color=look[series].color, linewidth=1.2, zorder=1)
    sizes = [x for x, _ in points.values()]
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) / 1.4, max(sizes) * 1.4)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: binary(value)))
    axes.set_title(title)
    axes.set_xlabel("state of one sequence")


def learning_chart(findings: Findings) -> Chart | None:
    """Scores and training loss by what was trained: mean over seeds, and a band from the lowest to the highest."""
    metric, look, panels = findings.metric, styles(findings.names), []
    shown: dict[str, Style] = {}
    for field, title in (("score", metric.title), ("train_loss", "Training loss")):
        curves = {name: curve for name in findings.names if (curve := seed_curve(findings, name, field))}
        if not curves:
            continue
        shown |= {name: look[name] for name in curves}
        zoom = "" if field != "score" else "rise" if metric.higher else "fall"
        draw = partial(_draw_curves, curves=curves, look=look, title=title, axis=f"{metric.round}s trained", zoom=zoom)
        ends = "; ".join(f"{name} ends at {curve[-1][1]:.4g}" for name, curve in curves.items())
        panels.append(Panel(draw, f"{title} per {metric.round}: {ends}."))
    if not panels:
        return None
    reading = (
        "How each mechanism learns: the line is the mean over seeds, the band goes from the lowest seed to the "
        "highest. The first axis is chosen for the second half of training; what was before may be cut off. The table "
        f"has the numbers of the last {metric.round}, never of the best one."
    )
    return Chart("learning-curves", "Learning curves", reading, panels, shown)


def seed_curve(findings: Findings, name: str, field: str) -> Curve:
    """The curve of a value of the records, over the finished runs."""
    found: dict[float, list[float]] = {}
    for row in findings.of("run", name):
        for record in row.get("records") or []:
            if isinstance(record.get(field), int | float):
                found.setdefault(record["round"], []).append(record[field])
    return [(x, fmean(values), min(values), max(values)) for x, values in sorted(found.items())]


def _draw_curves(
    axes: Any, *, curves: dict[str, Curve], look: dict[str, Style], title: str, axis: str, zoom: str
) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, curve in curves.items():
        rounds, means, lows, highs = map(list, zip(*curve, strict=True))
        axes.fill_between(rounds, lows, highs, color=look[name].color, alpha=0.15, linewidth=0)
        plot_line(axes, rounds, means, look[name], every=max(len(rounds) // 8, 1))
    axes.set_title(title)
    axes.set_xlabel(axis)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    points = [point for curve in curves.values() for point in curve]
    late = [point for point in points if point[0] >= SETTLED * max(x for x, *_ in points)]
    low = min(low for _, _, low, _ in (late if zoom == "rise" else points))
    high = max(high for *_, high in (late if zoom == "fall" else points))
    if zoom and high > low:
        axes.set_ylim(low - (high - low) * 0.05, high + (high - low) * 0.05)


def entropy_chart(findings: Findings) -> Chart | None:
    """The entropy of attention layer by layer, and how it depends on the length of the query."""
    look = styles(findings.names)
    entropy, correlation = (_layer_curves(findings, field) for field in ("entropy", "entropy_norm_correlation"))
    if not entropy:
        return None
    tokens = findings.meta.get("host", {}).get("tokens")
    even = log(tokens) if isinstance(tokens, int) and tokens > 1 else None
    highest = max(mean for curve in entropy.values() for _, mean in curve)
    line = even if even is not None and highest > NEAR * even else None
    reading = (
        "How widely a token spreads its attention: low entropy means that it looks at few tokens, high that it looks "
        "at nearly all alike. Each point is a mean over heads; the thick line is softmax."
    )
    if line is not None:
        reading += f" The dotted line is attention that is even over all {tokens:,} tokens, {line:.2f} nats."
    panels = [_layer_panel("Entropy of attention, nats", entropy, look, line)]
    if correlation:
        reading += (
            " On the right, or below: whether longer queries attend more sharply (under zero) or the length of the "
            "query makes no difference (at zero)."
        )
        panels.append(_layer_panel("Correlation of entropy and query norm", correlation, look, 0.0))
    return Chart("entropy", "Entropy per layer", reading, panels, {name: look[name] for name in entropy})


def head_mean(values: Any) -> float | None:
    """The mean over heads of one statistic of a layer; heads without a value are left out."""
    found = [value for value in (values if isinstance(values, list) else [values]) if isinstance(value, int | float)]
    found = [value for value in found if value == value]
    return fmean(found) if found else None


def _layer_curves(findings: Findings, field: str) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for name in findings.names:
        means = [head_mean(layer.get(field)) for layer in findings.layers(name)]
        if curve := [(number, mean) for number, mean in enumerate(means, 1) if mean is not None]:
            found[name] = curve
    return found


def _layer_panel(title: str, curves: dict[str, Any], look: dict[str, Style], line: float | None) -> Panel:
    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        for name, curve in curves.items():
            plot_line(axes, [layer for layer, _ in curve], [mean for _, mean in curve], look[name])
        if line is not None:
            axes.axhline(line, color=MUTED, linestyle=":", linewidth=1.2)
        axes.set_title(title)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))

    ends = "; ".join(f"{name} {curve[0][1]:.2f} to {curve[-1][1]:.2f}" for name, curve in curves.items())
    return Panel(draw, f"{title}, from the first layer to the last: {ends}.")


def cost_chart(findings: Findings) -> Chart | None:
    """Memory, operations and state as bars; of the operations, those of attention are drawn dark."""
    panels = []
    of_one = f"of one {findings.metric.counted}"
    for field, title, part in (
        ("peak_bytes_train", "Peak memory of training, {}B", ""),
        ("flops", f"Operations {of_one}, {{}}FLOPs", "attention_flops"),
        ("state_bytes", "State of one sequence, {}B", ""),
    ):
        values = {name: value for name in findings.names if (value := findings.field(name, field)) is not None}
        if values:
            parts = {name: findings.field(name, part) for name in values} if part else {}
            unit = MIB if field == "peak_bytes_train" else common_unit(
                values.values(), prefixes=BINARY if field == "state_bytes" else PREFIXES
            )  # fmt: skip
            panels.append(_bars(values, parts, unit, title.format(unit.prefix), styles(findings.names)))
    if not panels:
        return None
    reading = (
        "Shorter is cheaper. Memory is the most that one training step needed; of the operations the dark part is "
        "attention, the pale part the rest of the host; the state is all that is kept of a sequence to go on from."
    )
    return Chart("cost", "What it costs", reading, panels)


def _bars(values: dict[str, float], parts: dict[str, float], unit: Unit, title: str, look: dict[str, Style]) -> Panel:
    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        highest = max(values.values()) / unit.factor or 1.0
        for y, (name, value) in enumerate(values.items()):
            shade = {"color": look[name].color, "linewidth": 0}
            axes.barh(y, value / unit.factor, 0.62, alpha=0.35 if parts else 1.0, **shade)
            if parts.get(name):
                axes.barh(y, parts[name] / unit.factor, 0.62, **shade)
            place = value / unit.factor + highest * 0.015
            axes.text(place, y, unit.text(value), va="center", color=MUTED, fontsize=8.5)
        axes.set_yticks(range(len(values)), list(values), color=INK)
        for label, name in zip(axes.get_yticklabels(), values, strict=True):
            label.set_fontweight("bold" if look[name].emphasised else "normal")
        axes.set_ylim(len(values) - 0.45, -0.55)
        axes.set_xlim(0, highest * 1.2)
        axes.set_title(title)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))

    alt = f"{title}: " + "; ".join(f"{name} {unit.text(value)}" for name, value in values.items()) + "."
    return Panel(draw, alt, height=0.95 + 0.26 * len(values), left=min(0.3 + 0.075 * max(map(len, values)), 1.5))
