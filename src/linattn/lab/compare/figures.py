"""The charts of a comparison: score against speed and state, learning, entropy by layer, and where tokens look."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, log
from statistics import fmean
from typing import Any

from linattn.lab.compare.findings import Findings
from linattn.lab.page.numbers import binary, short
from linattn.lab.page.plots import MUTED, Chart, Panel, plot_line, styles

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
        locator: Any = MaxNLocator(5, steps=[1, 2, 5, 10])
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
    metric, panels = findings.metric, []
    for field, title in (("score", metric.axis), ("train_loss", "Training loss")):
        curves = {name: seed_curve(findings, name, field) for name in findings.names}
        panels += _curves(title, f"{metric.round}s trained", curves, zoom=field == "score")
    reading = (
        "How each mechanism learns: the line is the mean over seeds, the band goes from the lowest seed to the "
        "highest. The first axis is chosen for the second half of training; what was before may be cut off. The table "
        f"has the numbers of the last {metric.round}, never of the best one."
    )
    return Chart("learning-curves", "Learning curves", reading, panels, styles(findings.names))


def seed_curve(findings: Findings, name: str, field: str) -> Curve:
    """The curve of a value of the records, over the finished runs."""
    found: dict[float, list[Any]] = {}
    for row in findings.of("run", name):
        for record in row.get("records") or []:
            found.setdefault(record["round"], []).append(record.get(field))
    return _curve(found)


def entropies(findings: Findings) -> Chart:
    """The entropy of attention layer by layer, and how it depends on the length of the query."""
    tokens, panels = findings.meta.get("host", {}).get("tokens"), []
    even = log(tokens) if isinstance(tokens, int) else None
    for field, title, line in (
        ("entropy", "Entropy of attention, nats", even),
        ("entropy_norm_correlation", "Correlation of entropy and query norm", 0.0),
    ):
        layers = {name: enumerate(findings.layers(name), 1) for name in findings.names}
        curves = {name: _curve({number: layer.get(field) for number, layer in own}) for name, own in layers.items()}
        panels += _curves(title, "layer", curves, line=line)
    reading = (
        "How widely a token spreads its attention: low entropy means that it looks at few tokens, high that it looks "
        "at nearly all alike. The line is the mean over heads, the band goes from the lowest to the highest. "
    )
    if even is not None:
        reading += f"Attention that is even over all {tokens:,} tokens, the dotted line, has {even:.2f} nats. "
    reading += "The other panel shows whether longer queries attend more sharply (under zero) or alike (at zero)."
    return Chart("entropy", "Entropy per layer", reading, panels, styles(findings.names))


def numbers_in(values: Any) -> list[float]:
    """Those of seeds or heads that have one."""
    return [value for value in values or [] if isinstance(value, int | float) and value == value]


def _curve(values: Mapping[float, Any]) -> Curve:
    found = {x: kept for x, own in sorted(values.items()) if (kept := numbers_in(own))}
    return [(x, fmean(kept), min(kept), max(kept)) for x, kept in found.items()]


def _curves(
    title: str, axis: str, curves: Mapping[str, Curve], zoom: bool = False, line: float | None = None
) -> list[Panel]:
    """A panel, or none: means with bands, and a dotted line. ``zoom``: a frame for the second half of the points."""
    look, found = styles(list(curves)), {name: curve for name, curve in curves.items() if curve}
    if not found:
        return []

    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        for name, curve in found.items():
            x, means, lows, highs = map(list, zip(*curve, strict=True))
            axes.fill_between(x, lows, highs, color=look[name].color, alpha=0.15, linewidth=0)
            plot_line(axes, x, means, look[name], every=max(len(x) // 8, 1))
        axes.set(title=title, xlabel=axis)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        points = [point for curve in found.values() for point in curve]
        late = [point for point in points if point[0] >= SETTLED * max(x for x, *_ in points)]
        low, high = min(point[2] for point in late), max(point[3] for point in late)
        if zoom and high > low:
            axes.set_ylim(low - (high - low) * 0.05, high + (high - low) * 0.05)
        if line is not None:
            axes.axhline(line, color=MUTED, linestyle=":", linewidth=1.2)

    ends = "; ".join(f"{name} from {curve[0][1]:.4g} to {curve[-1][1]:.4g}" for name, curve in found.items())
    return [Panel(draw, f"{title} by {axis}: {ends}.")]


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
