"""Reads off series of times how they grow, and where one crosses another."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from typing import Any

# Below this length, the fixed costs of a call hide how its work grows.
GROWTH_FROM = (2048, 1024)  # the first that leaves enough points
LEAST_MS = 0.1  # shorter times are mostly those of the call itself, and of the timer
LEAST_POINTS, LARGEST_ERROR = 3, 0.4  # the standard error of an exponent


def growth_exponent(times: Mapping[int, float]) -> float | None:
    """p of ``time = c T^p`` by least squares in log-log; None for fewer than two lengths."""
    return _power([(log(T), log(t)) for T, t in times.items()])[0] if len(times) > 1 else None


def clear_growth(times: Mapping[int, float]) -> float | None:
    """:func:`growth_exponent` of milliseconds over T >= 2048, else over T >= 1024, where it can be told.

    None for fewer than three lengths, for times near the timer's noise, and for times that follow no power.

    Example:
        >>> round(clear_growth({1024: 5.0, 2048: 20.0, 4096: 80.0}), 6)
        2.0
        >>> clear_growth({1024: 5.0, 2048: 900.0, 4096: 80.0})
    """
    clear = [(T, t) for T, t in times.items() if t >= LEAST_MS]
    series = [[(log(T), log(t)) for T, t in clear if shortest <= T] for shortest in GROWTH_FROM]
    points = next((own for own in series if len(own) >= LEAST_POINTS), None)
    slope, error = _power(points) if points else (None, 0.0)
    return slope if error <= LARGEST_ERROR else None


def _power(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope of the line through the points, and its standard error."""
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, (rest / max(len(points) - 2, 1) / spread) ** 0.5


def crossover(slow_later: Mapping[int, float], fast_later: Mapping[int, float]) -> float | None:
    """The length from which ``fast_later`` is the faster of the two, interpolated in log-log.

    It is the last crossing, so that the answer holds for all longer lengths measured. None if ``fast_later`` is not
    faster at the longest length; the shortest length if it is faster at all of them.
    """
    lengths = sorted(slow_later.keys() & fast_later.keys())
    if not lengths:
        return None
    gain = [log(slow_later[T] / fast_later[T]) for T in lengths]
    if gain[-1] <= 0:
        return None
    for i in range(len(lengths) - 1, 0, -1):
        if gain[i - 1] <= 0:
            share = -gain[i - 1] / (gain[i] - gain[i - 1])
            return exp(log(lengths[i - 1]) + share * log(lengths[i] / lengths[i - 1]))
    return float(lengths[0])


Rows = Iterable[Mapping[str, Any]]


def steady(rows: Rows) -> list[Mapping[str, Any]]:
    """The rows whose time tells something: half of the distance from p20 to p80 is at most half of the median."""
    return [row for row in rows if not row.get("p80_ms") or row["p80_ms"] - row["p20_ms"] <= row["median_ms"]]


def times_by(rows: Rows, length: str, value: str = "median_ms", **where: Any) -> dict[int, float]:
    """A value by length, of the rows that count and have the values of ``where``."""
    wanted = {"status": "ok"} | where
    chosen = [row for row in rows if all(row.get(key) == own for key, own in wanted.items())]
    return {row[length]: row[value] for row in sorted(chosen, key=lambda row: row[length]) if row.get(value)}


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
