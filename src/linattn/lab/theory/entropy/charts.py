"""Charts of the experiment: entropy against the norm of queries, their correlation, and the effect of a power."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

from linattn.lab.page.numbers import short
from linattn.lab.page.plots import Chart, Panel, plot_line
from linattn.lab.page.style import MUTED, Style, styles
from linattn.lab.theory.entropy.measure import Row, kind_of
from linattn.lab.theory.entropy.sequences import Check

KINDS = {"sharper": "Sharper as queries grow", "blind": "Blind to the norm", "wider": "Wider as queries grow"}
UNIT = "PSE, nats"
FEW = 8  # up to so many lines share one panel, whatever their kind


@dataclass(frozen=True)
class Curve:
    """One mechanism on one source of activations: the mean over its layers."""

    mechanism: str
    norms: list[float]
    pse: list[float]
    correlation: float | None
    keys: int

    @property
    def kind(self) -> str:
        return kind_of(self.pse)


def curves_of(rows: list[Row], wanted: Callable[[Row], bool]) -> dict[str, Curve]:
    """Curves by mechanism, for those that have rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.pse and wanted(row):
            found.setdefault(row.mechanism, []).append(row)
    curves = {}
    for name, layers in found.items():
        norms, pse = (_means([getattr(row, field) for row in layers]) for field in ("norms", "pse"))
        known = [row.correlation for row in layers if row.correlation is not None]
        correlation = sum(known) / len(known) if known else None
        curves[name] = Curve(name, norms, pse, correlation, max(row.keys for row in layers))
    return curves


def _means(lists: list[tuple[float, ...]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*lists, strict=True)]


def charts_of(
    names: list[str],
    random: dict[str, Curve],
    real: dict[str, Curve],
    trained: dict[str, Curve],
    source: str,
    checks: list[Check],
) -> list[Chart]:
    """The charts for which there are numbers, in reading order."""
    look = styles(names)
    found = [
        _norms("random", "Random activations", "Each mechanism as it starts, on the same random queries and keys.",
               random, look),
        _norms("real", "Real activations", f"The same on the queries and keys of a model ({source}).", real, look),
        _norms("trained", "Trained with the mechanism", "Each mechanism in a host that was trained with it.",
               trained, look),
        _correlations(random, real, look),
        _powers(checks),
    ]  # fmt: skip
    return [chart for chart in found if chart is not None]


def _norms(name: str, title: str, first: str, curves: dict[str, Curve], look: dict[str, Style]) -> Chart | None:
    if not curves:
        return None
    reading = (
        f"{first} All queries are made longer together, and nothing else changes; across: their median norm. Low: a "
        "query looks at few keys. Dotted: even attention. Means over layers, heads and queries."
    )
    panels = []
    together = len(curves) <= FEW
    for kind, heading in {"": "All mechanisms"}.items() if together else KINDS.items():
        own = {mechanism: curve for mechanism, curve in curves.items() if together or curve.kind == kind}
        if own:
            ends = "; ".join(f"{m} {c.pse[0]:.2f} to {c.pse[-1]:.2f}" for m, c in own.items())
            draw = partial(_draw_norms, heading=heading, curves=own, look=look, all_curves=list(curves.values()))
            panels.append(Panel(draw, f"{heading}: {ends}."))
    return Chart(f"entropy-{name}", title, reading, panels, {m: look[m] for m in curves})


def _draw_norms(
    axes: Any, *, heading: str, curves: dict[str, Curve], look: dict[str, Style], all_curves: list[Curve]
) -> None:
    from matplotlib.ticker import NullFormatter

    for name, curve in curves.items():
        plot_line(axes, curve.norms, curve.pse, look[name], every=2)
    even = log(max(curve.keys for curve in all_curves))
    axes.axhline(even, color=MUTED, linestyle=":", linewidth=1.2)
    axes.set_ylim(min(0.0, *(min(curve.pse) for curve in all_curves)) - 0.05, 1.05 * even)  # alike in all panels
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"{heading}: {UNIT}")
    axes.set_xlabel("median norm of the queries")


def _correlations(random: dict[str, Curve], real: dict[str, Curve], look: dict[str, Style]) -> Chart | None:
    sets = {"random": random, "real": real}
    known = {title: {m: c for m, c in curves.items() if c.correlation is not None} for title, curves in sets.items()}
    known = {title: curves for title, curves in known.items() if curves}
    if not known:
        return None
    panels = []
    for title, curves in known.items():
        order = sorted(curves, key=lambda m: curves[m].correlation or 0.0)
        worst = "; ".join(f"{m} {curves[m].correlation:+.2f}" for m in order)
        draw = partial(_draw_correlations, heading=f"{title.capitalize()} activations", order=order, curves=curves,
                       look=look)  # fmt: skip
        panels.append(Panel(draw, f"Correlations on {title} activations: {worst}.", 1.0 + 0.19 * len(order), 1.15))
    reading = (
        "Pearson's correlation, over single queries, of a row's entropy and the norm of its query; below zero: longer "
        "queries look sharper. Filled: the mechanism sees the norm; hollow: it is blind to it, and what correlates is "
        "the direction of long queries. The charts above tell the two apart."
    )
    return Chart("entropy-correlation", "Entropy and norm of single queries", reading, panels)


def _draw_correlations(
    axes: Any, *, heading: str, order: list[str], curves: dict[str, Curve], look: dict[str, Style]
) -> None:
    axes.axvline(0, color=MUTED, linewidth=1.0)
    for place, name in enumerate(order):
        style, curve = look[name], curves[name]
        face = "none" if curve.kind == "blind" else style.color
        axes.plot([curve.correlation], [place], marker=style.marker, color=style.color, markerfacecolor=face,
                  markersize=5.5, linestyle="")  # fmt: skip
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlim(-1, 1)
    axes.set_xticks((-1, -0.5, 0, 0.5, 1))
    axes.set_title(heading)
    axes.set_xlabel("correlation of entropy and norm")


def _powers(checks: list[Check]) -> Chart | None:
    """Draw the checks' numbers named ``<line>_p=<power>`` as lines."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for check in checks:
        for key, value in check.numbers.items():
            for prefix, name in (("pse_p=", "sequences"), ("focused_power=", "focused"), ("nala_power=", "nala")):
                if key.startswith(prefix):
                    lines.setdefault(name, []).append((float(key.removeprefix(prefix)), value))
    if not lines:
        return None
    look = styles(list(lines))
    panel = Panel(partial(_draw_powers, lines=lines, look=look), "Entropy falls with the power in every line.")
    reading = "Random positive sequences x^p, and rows of attention whose features are raised to a power."
    return Chart("entropy-power", "A power lowers the entropy", reading, [panel], look)


def _draw_powers(axes: Any, *, lines: dict[str, list[tuple[float, float]]], look: dict[str, Style]) -> None:
    for name, line in lines.items():
        plot_line(axes, [power for power, _ in line], [value for _, value in line], look[name])
    axes.set_title(f"Mean {UNIT}")
    axes.set_xlabel("power")
