"""Reads off series of times how they grow, and where one crosses another."""

from collections.abc import Mapping
from math import exp, log

# Below this length, the fixed costs of a call hide how its work grows.
GROWTH_FROM = 2048


def growth_exponent(times: Mapping[int, float]) -> float | None:
    """p of ``time = c T^p`` by least squares in log-log, over T >= 2048 if that leaves three points or more.

    None for fewer than two lengths.
    """
    long = {T: t for T, t in times.items() if T >= GROWTH_FROM}
    points = [(log(T), log(t)) for T, t in (long if len(long) >= 3 else times).items()]
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


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
