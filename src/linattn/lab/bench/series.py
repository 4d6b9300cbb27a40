"""What is read off values by length: how they grow, where one crosses another; and the panels that show them."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from typing import Any

import numpy

from linattn.lab.page.plots import Panel, Style, plot_line

Rows = Iterable[Mapping[str, Any]]
UNMEASURED = ("out of memory", "left out", "failed", "absent")
# Below this length, the fixed costs of a call hide how its work grows.
GROWTH_FROM = (2048, 1024)  # the first that leaves enough points
LEAST_MS = 0.1  # shorter times are mostly those of the call itself, and of the timer
LEAST_POINTS, LARGEST_ERROR = 3, 0.4  # the standard error of an exponent


def clear_growth(times: Mapping[int, float]) -> float | None:
    """p of ``time = c T^p`` by least squares in log-log, of milliseconds over T >= 2048, else over T >= 1024.

    None for fewer than three lengths, for times near the timer's noise, and for times that follow no power.

    Example:
        >>> round(clear_growth({1024: 5.0, 2048: 20.0, 4096: 80.0}), 6)
        2.0
        >>> clear_growth({1024: 5.0, 2048: 900.0, 4096: 80.0})
    """
    clear = [(T, t) for T, t in times.items() if t >= LEAST_MS]
    series = [[(log(T), log(t)) for T, t in clear if shortest <= T] for shortest in GROWTH_FROM]
    points = next((own for own in series if len(own) >= LEAST_POINTS), None)
    if points is None:
        return None
    lengths, logs = zip(*points, strict=True)
    (slope, _), covariance = numpy.polyfit(lengths, logs, 1, cov=True)
    return float(slope) if covariance[0, 0] ** 0.5 <= LARGEST_ERROR else None


def crossover(slow_later: Mapping[int, float], fast_later: Mapping[int, float]) -> float | None:
    """The length from which ``fast_later`` is the faster of the two, interpolated in log-log.

    It is the last crossing, so that the answer holds for all longer lengths measured. None if ``fast_later`` is not
    faster at the longest length; the shortest length if it is faster at all of them.
    """
    lengths = sorted(slow_later.keys() & fast_later.keys())
    gain = [log(slow_later[T] / fast_later[T]) for T in lengths]
    if not lengths or gain[-1] <= 0:
        return None
    for i in range(len(lengths) - 1, 0, -1):
        if gain[i - 1] <= 0:
            share = -gain[i - 1] / (gain[i] - gain[i - 1])
            return exp(log(lengths[i - 1]) + share * log(lengths[i] / lengths[i - 1]))
    return float(lengths[0])


def steady(rows: Rows) -> list[Mapping[str, Any]]:
    """The rows whose time tells something: half of the distance from p20 to p80 is at most half of the median."""
    return [row for row in rows if not row.get("p80_ms") or row["p80_ms"] - row["p20_ms"] <= row["median_ms"]]


def times_by(rows: Rows, length: str, value: str = "median_ms", **where: Any) -> dict[int, float]:
    """A value by length, of the rows that count and have the values of ``where``."""
    wanted = {"status": "ok"} | where
    chosen = [row for row in rows if all(row.get(key) == own for key, own in wanted.items())]
    return {row[length]: row[value] for row in sorted(chosen, key=lambda row: row[length]) if row.get(value)}


def compare_with(rows: Rows, name: str, reference: str, *same: str, value: str = "median_ms", key: str) -> None:
    """Add to each row, as ``key``, its value over that of the reference among the rows that are alike in ``same``."""
    rows = list(rows)
    others = {tuple(row.get(own) for own in same): row.get(value) for row in rows if row.get(name) == reference}
    for row in rows:
        other = others.get(tuple(row.get(own) for own in same))
        row[key] = row[value] / other if row.get(value) and other else None  # type: ignore[index]


def crossovers(rows: Rows, length: str, reference: str, setting: str = "", **where: Any) -> list[dict[str, Any]]:
    """Where each mechanism becomes faster than the reference: ``length`` is None if it is not at the longest one.

    ``gain``: the time of the reference over its own at the longest length that both have.
    """
    rows, found = steady(rows), list[dict[str, Any]]()
    other = times_by(rows, length, mechanism=reference, **where)
    for name in dict.fromkeys(row["mechanism"] for row in rows):
        own = times_by(rows, length, mechanism=name, **where)
        both = sorted(other.keys() & own.keys())
        if name != reference and both:
            at = {"length": crossover(other, own), "longest": both[-1], "gain": other[both[-1]] / own[both[-1]]}
            found.append({"mechanism": name, "setting": setting} | at)
    return found


def overtaken(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """The same in words."""
    said = []
    for own in found:
        where = "is not faster than softmax" if own["length"] is None else f"is faster from {own['length']:,.0f} on"
        said.append(f"{own['mechanism']}, {own['setting']}: {where} ({own['gain']:.3g}x at {own['longest']:,})")
    return said


def panel(
    rows: Sequence[Mapping[str, Any]], name: str, length: str, value: str, title: str, ylabel: str,
    looks: Mapping[str, Style], unit: float,
) -> Panel:  # fmt: skip
    """A line of a value over logarithmic lengths for each name of ``looks``; crosses where it could not be measured."""
    series = {own: times_by(rows, length, value, **{name: own}) for own in looks}
    missing = {own: [r[length] for r in rows if r[name] == own and r["status"] in UNMEASURED] for own in looks}
    lengths = sorted({x for points in (*series.values(), *missing.values()) for x in points})

    def draw(axes: Any) -> None:
        for place, own in enumerate(looks):
            points = series[own]
            plot_line(axes, list(points), [x / unit for x in points.values()], looks[own])
            height = [0.96 - 0.05 * place] * len(missing[own])
            place_of = axes.get_xaxis_transform()
            axes.plot(missing[own], height, "x", color=looks[own].color, markersize=7, transform=place_of)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{x / 1024:g}k" if x % 1024 == 0 else f"{x:g}" for x in lengths])
        axes.minorticks_off()
        axes.set(title=title, xlabel=length, ylabel=ylabel)

    return Panel(draw, f"{title}: {ylabel} by {length} of {', '.join(series)}")
