"""Panels that the benchmarks share: lines by length, with crosses for what could not be measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from linattn.lab.bench.benchmark import UNMEASURED
from linattn.lab.bench.fit import times_by
from linattn.lab.page.plots import Panel, Style, plot_line

Lines = Mapping[str, Mapping[int, float]]
Rows = Sequence[Mapping[str, Any]]


def by_length(
    rows: Rows, name: str, length: str, value: str, title: str, ylabel: str, unit: float, looks: Mapping[str, Style],
    **more: Any,
) -> Panel:  # fmt: skip
    """:func:`lines` of a value of rows over their length, in a unit; names are those of ``looks``."""
    points = {own: times_by(rows, length, value, **{name: own}) for own in looks}
    scaled = {own: {T: x / unit for T, x in found.items()} for own, found in points.items()}
    lost = {own: [r[length] for r in rows if r[name] == own and r["status"] in UNMEASURED] for own in looks}
    return lines(title, ylabel, scaled, looks, missing=lost, **more)


def short(length: float) -> str:
    """Format a length: 1024 as 1k."""
    return f"{length / 1024:g}k" if length >= 1024 and length % 1024 == 0 else f"{length:g}"


def lines(
    title: str,
    ylabel: str,
    series: Lines,
    looks: Mapping[str, Style],
    *,
    xlabel: str = "tokens",
    log: bool = True,
    missing: Mapping[str, Sequence[int]] | None = None,
    marks: Sequence[float] = (),
    level: float | None = None,
) -> Panel:
    """A line a name over logarithmic lengths.

    Args:
        log: the y axis is logarithmic too, otherwise it starts at 0.
        missing: lengths at which a name could not be measured: crosses at the top.
        marks: lengths with a dotted line; level: a dotted line across.
    """
    missing = {name: x for name, x in (missing or {}).items() if x}
    lengths = sorted({x for own in series.values() for x in own} | {x for own in missing.values() for x in own})

    def draw(axes: Any) -> None:
        for name, points in series.items():
            if points:
                plot_line(axes, sorted(points), [points[x] for x in sorted(points)], looks[name])
        axes.set_xscale("log", base=2)
        if log:
            axes.set_yscale("log")
        elif series:
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        for place, (name, x) in enumerate(missing.items()):
            height = [0.96 - 0.05 * place] * len(x)
            axes.plot(x, height, "x", color=looks[name].color, markersize=7, transform=axes.get_xaxis_transform())
        for mark in marks:
            axes.axvline(mark, color="#999999", linestyle=":", linewidth=1)
        if level is not None:
            axes.axhline(level, color="#999999", linestyle=":", linewidth=1)
        axes.set_xticks(lengths, [short(x) for x in lengths])
        axes.minorticks_off()
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)

    absent = "".join(f"; {name} not at {', '.join(map(str, x))}" for name, x in missing.items())
    return Panel(draw, f"{title}: {ylabel} by {xlabel} of {', '.join(series)}{absent}")
