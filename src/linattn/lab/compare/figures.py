"""The charts of a comparison: score against speed and state, learning, entropy by layer, and where tokens look."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, log
from statistics import fmean
from typing import Any

from linattn.lab.compare.findings import Findings
from linattn.lab.page.numbers import binary, short
from linattn.lab.page.plots import MUTED, Chart, Panel, Style, plot_line, styles

LOG_FROM = 4.0  # an axis is logarithmic if the largest is this many times the smallest
SETTLED = 0.5  # scores of the first half are outside of the frame: the first rise would flatten all that follows
MAPS_ACROSS, MAP_LINE = 3, 1.25  # maps side by side in a panel, and inches of a line of them
MARK = "#00e5ff"  # around the token that looks
Curve = list[tuple[float, float, float, float]]  # x, mean, lowest, highest


def charts_of(findings: Findings) -> list[Chart]:
    """The charts for which there are numbers, in reading order."""
    return [chart for make in (states, speeds, learning, entropies) if (chart := make(findings)).panels]


# Scores against what they cost.


def speeds(findings: Findings) -> Chart:
    """Score against speed, a point for each mechanism, with the spread of both."""
    panels = []
    for way, words in (("forward", "forward"), ("train", "training")):
        counted = f"{findings.metric.counted}s"
        panels += _scores_against(findings, f"{counted}_per_second_{way}", f"{counted} per second, {words}", short)
    reading = (
        f"{'Up' if findings.metric.higher else 'Down'} is more accurate, right is faster. Each point is a mean over "
        "seeds and the median speed; bars go from the lowest to the highest of both. Seeds are compared in pairs by "
        "the table, which these bars do not show."
    )
    return Chart("accuracy-speed", f"{findings.metric.title} against speed", reading, panels, styles(_scored(findings)))


def states(findings: Findings) -> Chart:
    """Score against the bytes kept of a sequence, a line through the widths of each host; only for sequences."""
    panels = _scores_against(findings, "state_bytes", "state of one sequence", binary)
    reading = (
        f"{'Up' if findings.metric.higher else 'Down'} is more accurate, left remembers in less: all that is kept of a "
        "sequence to go on from, over all layers. Each point is a mean over seeds, its bar goes from the lowest seed "
        "to the highest; a line joins the widths of the host. The state of softmax grows with the sequence."
    )
    return Chart("accuracy-state", f"{findings.metric.title} against state", reading, panels, styles(_scored(findings)))


def _scored(findings: Findings) -> list[str]:
    """Names of mechanisms with a score, whatever the width of their host."""
    return list(dict.fromkeys(findings.series(name) for name in findings.names if findings.score(name)))


def _scores_against(findings: Findings, field: str, label: str, shown: Callable[[float], str]) -> list[Panel]:
    """A panel, or none: scores over what was measured, a line through the widths of a host."""
    metric, look = findings.metric, styles(_scored(findings))
    costs = {name: spread for name in findings.names if (spread := findings.spread(name, field))}
    scores = {name: row for name in costs if (row := findings.score(name))}
    if not scores:
        return []

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

        for series, style in look.items():
            names = sorted((name for name in scores if findings.series(name) == series), key=lambda name: costs[name])
            middles = [costs[name][0] for name in names], [scores[name].mean for name in names]
            plot_line(axes, *middles, style)
            for name, x, y in zip(names, *middles, strict=True):
                line = {"color": style.color, "linewidth": 1.2, "zorder": 1}
                axes.plot([x, x], [scores[name].least, scores[name].greatest], **line)
                axes.plot(costs[name][1:], [y, y], **line)
        low, high = min(costs[name][1] for name in scores), max(costs[name][2] for name in scores)
        locator = MaxNLocator(5, steps=[1, 2, 5, 10])
        axes.margins(x=0.15)
        if high / low > LOG_FROM:
            axes.set_xscale("log", base=2 if shown is binary else 10)
            axes.xaxis.set_minor_locator(NullLocator())
            locator = LogLocator(2, numticks=7) if shown is binary else LogLocator(subs=(1, 2, 5))
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
        axes.set_title(metric.axis)
        axes.set_xlabel(label)

    alt = "; ".join(f"{name} {metric.text(row.mean)} at {shown(costs[name][0])}" for name, row in scores.items())
    return [Panel(draw, f"{metric.title} against {label}: {alt}.", right=0.34)]


def learning(findings: Findings) -> Chart:
    """Scores and training loss by what was trained: mean over seeds, and a band from the lowest to the highest."""
    metric, look = findings.metric, styles(findings.names)
    axis, panels = f"{metric.round}s trained", []
    for field, title in (("score", metric.axis), ("train_loss", "Training loss")):
        curves = {name: curve for name in findings.names if (curve := seed_curve(findings, name, field))}
        if curves:
            ends = "; ".join(f"{name} ends at {curve[-1][1]:.4g}" for name, curve in curves.items())
            draw = partial(_draw_curves, curves=curves, look=look, title=title, axis=axis, zoom=field == "score")
            panels.append(Panel(draw, f"{title} per {metric.round}: {ends}."))
    reading = (
        "How each mechanism learns: the line is the mean over seeds, the band goes from the lowest seed to the "
        "highest. The first axis is chosen for the second half of training; what was before may be cut off. The table "
        f"has the numbers of the last {metric.round}, never of the best one."
    )
    return Chart("learning-curves", "Learning curves", reading, panels, look)


def seed_curve(findings: Findings, name: str, field: str) -> Curve:
    """The curve of a value of the records, over the finished runs."""
    found: dict[float, list[float]] = {}
    for row in findings.of("run", name):
        for record in row.get("records") or []:
            if isinstance(record.get(field), int | float):
                found.setdefault(record["round"], []).append(record[field])
    return [(x, fmean(values), min(values), max(values)) for x, values in sorted(found.items())]


def _draw_curves(
    axes: Any, curves: dict[str, Curve], look: dict[str, Style], title: str, axis: str, zoom: bool
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
    low, high = min(point[2] for point in late), max(point[3] for point in late)
    if zoom and high > low:
        axes.set_ylim(low - (high - low) * 0.05, high + (high - low) * 0.05)


# Attention.


def entropies(findings: Findings) -> Chart:
    """The entropy of attention layer by layer, and how it depends on the length of the query."""
    tokens = findings.meta.get("host", {}).get("tokens")
    even = log(tokens) if isinstance(tokens, int) else None
    panels = _by_layer(findings, "entropy", "Entropy of attention, nats", even)
    panels += _by_layer(findings, "entropy_norm_correlation", "Correlation of entropy and query norm", 0.0)
    reading = (
        "How widely a token spreads its attention: low entropy means that it looks at few tokens, high that it looks "
        "at nearly all alike. Each point is a mean over heads; the thick line is softmax. "
    )
    if even is not None:
        reading += f"Attention that is even over all {tokens:,} tokens, the dotted line, has {even:.2f} nats. "
    reading += "The other panel shows whether longer queries attend more sharply (under zero) or alike (at zero)."
    return Chart("entropy", "Entropy per layer", reading, panels, styles(findings.names))


def head_mean(values: Any) -> float | None:
    """The mean over heads of one statistic of a layer; heads without a value are left out."""
    found = [value for value in values or [] if isinstance(value, int | float) and value == value]
    return fmean(found) if found else None


def _by_layer(findings: Findings, field: str, title: str, line: float | None) -> list[Panel]:
    """A panel, or none: means over heads, and a dotted line."""
    curves, look = {}, styles(findings.names)
    for name in findings.names:
        means = [head_mean(layer.get(field)) for layer in findings.layers(name)]
        if curve := [(number, mean) for number, mean in enumerate(means, 1) if mean is not None]:
            curves[name] = curve
    if not curves:
        return []

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
    return [Panel(draw, f"{title}, from the first layer to the last: {ends}.")]


def maps(names: Sequence[str], examples: Mapping[str, Any]) -> Chart:
    """Where a token of each image looks: a panel an image, with a small picture for each mechanism that has a map."""
    reading = (
        f"Where the token in the frame looks in the layer {examples.get('layer')}. Each square is one token; the "
        "brighter it is, the more weight it has. Every map is scaled to its own largest weight, so compare shapes."
    )
    panels = []
    for image in examples.get("images", []):
        known = [name for name in names if image["maps"].get(name)]
        alt = f"Where the marked token of an image of class {image['label']} looks, with {', '.join(known)}."
        if known:
            height = MAP_LINE * ceil((len(known) + 1) / MAPS_ACROSS) + 1
            panels.append(Panel(partial(draw_maps, names=known, image=image), alt, height, left=0.1, right=0.1))
    return Chart("attention-maps", "Attention on example images", reading, panels)


def draw_maps(axes: Any, names: Sequence[str], image: Mapping[str, Any]) -> None:
    """The image, ``(H, W)`` or ``(H, W, 3)`` from 0 to 255, and maps ``(h, w)``, with a frame around the token."""
    from matplotlib.patches import Rectangle

    axes.set_axis_off()
    axes.set_title(f"class {image['label']}")
    lines, (row, column) = ceil((len(names) + 1) / MAPS_ACROSS), image["token"]
    height, width = len(image["maps"][names[0]]), len(image["maps"][names[0]][0])
    for number, name in enumerate(("", *names)):
        x, y = number % MAPS_ACROSS / MAPS_ACROSS, 1 - (number // MAPS_ACROSS + 1) / lines
        small = axes.inset_axes((x + 0.01, y, 1 / MAPS_ACROSS - 0.02, 0.86 / lines))
        small.set_axis_off()
        small.set_title(name, fontsize=8.5, pad=2, loc="center")
        look = {"cmap": "inferno", "vmin": 0} if name else {"cmap": "gray", "vmin": 0, "vmax": 255}
        pixels = image["maps"][name] if name else image["pixels"]
        small.imshow(pixels, extent=(0, width, height, 0), interpolation="nearest", **look)
        small.add_patch(Rectangle((column, row), 1, 1, fill=False, color=MARK, linewidth=1.4))
