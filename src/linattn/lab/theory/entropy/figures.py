"""What the page of ``linattn lab entropy`` shows: checks, entropies against norms, correlations, powers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from statistics import fmean
from typing import TYPE_CHECKING, Any

from linattn.lab.page import Section
from linattn.lab.page.numbers import listed, short
from linattn.lab.page.plots import MUTED, Chart, Panel, Style, plot_line, styles
from linattn.lab.theory.entropy.experiment import kind_of

if TYPE_CHECKING:
    from pandas import DataFrame

Row = Mapping[str, Any]
KINDS = {"sharper": "Sharper as queries grow", "blind": "Blind to the norm", "wider": "Wider as queries grow"}
UNIT = "PSE, nats"
FEW = 8  # up to so many lines share one panel, whatever their kind
GROUPS = {
    "Random activations": "Each mechanism as it starts, on the same random queries and keys.",
    "Real activations": "The same on the queries and keys of a model ({}).",
    "As trained": "Each mechanism in a host that was trained with it.",
}


@dataclass(frozen=True)
class Curve:
    """One mechanism on one source of activations: the mean over its layers."""

    norms: list[float]
    pse: list[float]
    correlation: float | None
    keys: int

    @property
    def kind(self) -> str:
        return kind_of(self.pse)

    @classmethod
    def over(cls, layers: Sequence[Row]) -> "Curve":
        known = [row["correlation"] for row in layers if _there(row["correlation"])]
        norms, pse = ([fmean(v) for v in zip(*(row[key] for row in layers), strict=True)] for key in ("norms", "pse"))
        return cls(norms, pse, fmean(known) if known else None, max(int(row["keys"]) for row in layers))


def _there(value: Any) -> bool:
    """Whether a cell of a frame has a value: missing ones are NaN there."""
    return value is not None and value == value


def groups_of(rows: Sequence[Row]) -> dict[str, dict[str, Curve]]:
    """Curves by mechanism, on random activations, on those of the first model, and as they were trained."""
    measured = [row for row in rows if row["about"] != "checks" and isinstance(row.get("pse"), list)]
    wanted = {
        "Random activations": [row for row in measured if row["about"] == "random"],
        "Real activations": [row for row in measured if row["about"] != "random" and not row["trained"]],
        "As trained": [row for row in measured if row["trained"]],
    }
    return {
        title: {name: Curve.over([r for r in own if r["mechanism"] == name]) for name in _names(own)}
        for title, own in wanted.items()
        if own
    }


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["mechanism"] for row in rows))


def summary(rows: Sequence[Row]) -> list[str]:
    checks = [row for row in rows if row["about"] == "checks"]
    said = [f"{sum(bool(check['passed']) for check in checks)} of {len(checks)} checks hold."]
    groups = groups_of(rows)
    for title, words in (("Random activations", "random activations"), ("Real activations", "real ones")):
        if title in groups:
            blind = [name for name, curve in groups[title].items() if curve.kind == "blind"]
            who = listed(blind) if blind else "none"
            said.append(f"On {words} {len(blind)} of {len(groups[title])} are blind to the norm of the query: {who}.")
    return said


def numbers(curves: Mapping[str, Curve]) -> list[list[object]]:
    """Of each mechanism: entropy of the shortest and of the longest queries, the correlation, and its kind."""
    return [[name, curve.pse[0], curve.pse[-1], curve.correlation, curve.kind] for name, curve in curves.items()]


def sections(frame: "DataFrame") -> list[Section]:
    rows = frame.to_dict("records")
    groups, table = groups_of(rows), type(frame)
    checks = [row for row in rows if row["about"] == "checks"]
    look = styles(list(dict.fromkeys(name for curves in groups.values() for name in curves)))
    said = [[c["statement"], c["kind"], "pass" if c["passed"] else "FAIL", _shown(c["numbers"])] for c in checks]
    found = [Section("Theorems, checked", table=table(said, columns=["statement", "kind", "verdict", "numbers"]))]
    source = next((row["source"] for row in rows if row["about"] in ("host", "text")), "")
    found += [
        Section(title, chart=_norms(title, GROUPS[title].format(source), own, look)) for title, own in groups.items()
    ]
    for chart in (_correlations(groups, look), _powers(checks)):
        if chart is not None:
            found.append(Section(chart.title, chart=chart))
    heads = ["mechanism", "shortest queries", "longest queries", "correlation", "as queries grow"]
    units = {"shortest queries": "nats", "longest queries": "nats", "correlation": "with the norm"}
    for title, own in groups.items():
        found.append(Section(f"Numbers: {title.lower()}", table=table(numbers(own), columns=heads), units=units))
    left = [[row["mechanism"], row["source"], row["reason"]] for row in rows if isinstance(row.get("reason"), str)]
    if left:
        found.append(Section("Left out", table=table(left, columns=["mechanism", "activations", "why"])))
    return found


def _shown(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {value:.4g}" for name, value in values.items())


def _norms(title: str, first: str, curves: Mapping[str, Curve], look: Mapping[str, Style]) -> Chart:
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
    name = title.split()[-1 if title.startswith("As") else 0].lower()
    return Chart(f"entropy-{name}", title, reading, panels, {m: look[m] for m in curves})


def _draw_norms(
    axes: Any, *, heading: str, curves: Mapping[str, Curve], look: Mapping[str, Style], all_curves: Sequence[Curve]
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


def _correlations(groups: Mapping[str, Mapping[str, Curve]], look: Mapping[str, Style]) -> Chart | None:
    panels = []
    for title in ("Random activations", "Real activations"):
        curves = {name: c for name, c in groups.get(title, {}).items() if c.correlation is not None}
        if curves:
            order = sorted(curves, key=lambda name: curves[name].correlation or 0.0)
            each = "; ".join(f"{name} {curves[name].correlation:+.2f}" for name in order)
            draw = partial(_draw_correlations, heading=title, order=order, curves=curves, look=look)
            panels.append(Panel(draw, f"{title}, correlations: {each}.", 1.0 + 0.19 * len(order), 1.15))
    reading = (
        "Pearson's correlation, over single queries, of a row's entropy and the norm of its query; below zero: longer "
        "queries look sharper. Filled: the mechanism sees the norm; hollow: it is blind to it, and what correlates is "
        "the direction of long queries. The charts above tell the two apart."
    )
    return Chart("entropy-correlation", "Entropy and norm of single queries", reading, panels) if panels else None


def _draw_correlations(
    axes: Any, *, heading: str, order: Sequence[str], curves: Mapping[str, Curve], look: Mapping[str, Style]
) -> None:
    axes.axvline(0, color=MUTED, linewidth=1.0)
    for place, name in enumerate(order):
        style, curve = look[name], curves[name]
        face = "none" if curve.kind == "blind" else style.color
        axes.plot(
            [curve.correlation], [place], marker=style.marker, color=style.color, markerfacecolor=face, linestyle=""
        )
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlim(-1, 1)
    axes.set_title(heading)
    axes.set_xlabel("correlation of entropy and norm")


def _powers(checks: Sequence[Row]) -> Chart | None:
    """Draw the checks' numbers named ``<line>_p=<power>`` as lines."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for check in checks:
        for key, value in check["numbers"].items():
            for prefix, name in (("pse_p=", "sequences"), ("focused_power=", "focused"), ("nala_power=", "nala")):
                if key.startswith(prefix):
                    lines.setdefault(name, []).append((float(key.removeprefix(prefix)), value))
    if not lines:
        return None
    look = styles(list(lines))
    panel = Panel(partial(_draw_powers, lines=lines, look=look), "Entropy falls with the power in every line.")
    reading = "Random positive sequences x^p, and rows of attention whose features are raised to a power."
    return Chart("entropy-power", "A power lowers the entropy", reading, [panel], look)


def _draw_powers(axes: Any, *, lines: Mapping[str, Sequence[tuple[float, float]]], look: Mapping[str, Style]) -> None:
    for name, line in lines.items():
        plot_line(axes, [power for power, _ in line], [value for _, value in line], look[name])
    axes.set_title(f"Mean {UNIT}")
    axes.set_xlabel("power")
