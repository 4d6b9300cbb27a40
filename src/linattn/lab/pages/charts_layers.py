"""Charts of attention layer by layer: its entropy, and how that depends on the length of the query."""

from functools import partial
from math import log
from typing import Any

from linattn.lab.page.plots import Chart, Panel, plot_line
from linattn.lab.page.style import MUTED, Style, styles
from linattn.lab.pages.read import Comparison, head_mean, number

NEAR = 0.6  # the entropy of even attention is drawn if the lines come this near to it

Curve = list[tuple[int, float]]  # layer, counted from 1; mean over heads


def entropy_chart(comparison: Comparison) -> Chart | None:
    look = styles(comparison.names)
    entropy, correlation = (_curves(comparison, field) for field in ("entropy", "entropy_norm_correlation"))
    if not entropy:
        return None
    tokens = number(comparison.part("host").get("tokens"))
    even = log(tokens) if tokens and tokens > 1 else None
    highest = max(mean for curve in entropy.values() for _, mean in curve)
    line = even if even is not None and highest > NEAR * even else None
    reading = (
        "How widely a token spreads its attention: low entropy means that it looks at few tokens, high that it looks "
        "at nearly all alike. Each point is a mean over heads; the thick line is softmax."
    )
    if line is not None:
        reading += f" The dotted line is attention that is even over all {tokens:,.0f} tokens, {line:.2f} nats."
    panels = [_panel("Entropy of attention, nats", entropy, look, line)]
    if correlation:
        reading += (
            " On the right, or below: whether longer queries attend more sharply (under zero) or the length of the "
            "query makes no difference (at zero)."
        )
        panels.append(_panel("Correlation of entropy and query norm", correlation, look, 0.0))
    return Chart("entropy", "Entropy per layer", reading, panels, {name: look[name] for name in entropy})


def _curves(comparison: Comparison, field: str) -> dict[str, Curve]:
    found = {}
    for name in comparison.names:
        means = [head_mean(layer.get(field)) for layer in comparison.layers(name)]
        curve = [(i, mean) for i, mean in enumerate(means, 1) if mean is not None]
        if curve:
            found[name] = curve
    return found


def _panel(title: str, curves: dict[str, Curve], look: dict[str, Style], line: float | None) -> Panel:
    ends = "; ".join(f"{name} {curve[0][1]:.2f} to {curve[-1][1]:.2f}" for name, curve in curves.items())
    alt = f"{title}, from the first layer to the last: {ends}."
    return Panel(partial(_draw, title=title, curves=curves, look=look, line=line), alt)


def _draw(axes: Any, *, title: str, curves: dict[str, Curve], look: dict[str, Style], line: float | None) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, curve in curves.items():
        plot_line(axes, [layer for layer, _ in curve], [mean for _, mean in curve], look[name])
    if line is not None:
        axes.axhline(line, color=MUTED, linestyle=":", linewidth=1.2)
    axes.set_title(title)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
