"""What runs with several seeds show: differences paired by seed, with intervals that hold all at once.

Two mechanisms are trained with the same seeds, so that the seeds' luck cancels in the differences ``d_s`` of their
scores. For each pair, with n common seeds and the sample deviation ``std(d)``,

    interval = mean(d) +- t_{1 - 0.05 / (2 P), n - 1} std(d) / sqrt(n),        P = m (m - 1) / 2

P counts all pairs of the m mechanisms, and not only those that are reported: the best one is chosen after its scores
are known, so any pair may become "against the best". A difference is claimed if its interval leaves out 0, and two
mechanisms are called equal if it lies within a margin that was named beforehand. All of these hold together in 95 % of
comparisons or more (Bonferroni); heavy tails make the intervals wider than they need be. Below 5 seeds nothing is
claimed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import fsum, inf, sqrt
from statistics import fmean
from typing import NamedTuple

LEAST_SEEDS = 5
LEVEL = 0.95
FEW = "too few seeds"


class Difference(NamedTuple):
    """Mean difference of two mechanisms, its simultaneous interval, and what it shows.

    ``verdict``: better, worse, equal, no difference shown, or too few seeds.
    """

    mean: float
    low: float
    high: float
    seeds: int
    verdict: str


@dataclass(frozen=True)
class Row:
    """One mechanism: its scores, and its differences to the reference and to the best (None for these themselves)."""

    name: str
    mean: float
    std: float | None
    least: float
    greatest: float
    seeds: int
    to_reference: Difference | None
    to_best: Difference | None


@dataclass(frozen=True)
class Verdicts:
    """All rows in the order they were given, the best mechanism, and what is shown in sentences."""

    rows: list[Row]
    reference: str | None
    best: str
    sentences: list[str]


@cache
def quantile(pairs: int, freedom: int) -> float:
    """``t_{1 - 0.05 / (2 pairs)}`` with ``freedom`` degrees."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - (1 - LEVEL) / (2 * pairs)))


def deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None of a single value."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def difference(
    scores: Mapping[int, float],
    others: Mapping[int, float],
    pairs: int,
    higher: bool = True,
    margin: float | None = None,
) -> Difference | None:
    """``scores - others`` by common seeds; None if they have none in common.

    ``pairs``: so many intervals are to hold at once. ``higher``: whether a higher score is better. ``margin``: the
    difference that counts as none, named beforehand.

    Example:
        >>> a, b = {s: 90 + 0.1 * s for s in range(5)}, {s: 80 + 0.2 * s for s in range(5)}
        >>> difference(a, b, pairs=1).verdict
        'better'
    """
    paired = [scores[seed] - others[seed] for seed in sorted(scores.keys() & others.keys())]
    if not paired:
        return None
    count, mean, std = len(paired), fmean(paired), deviation(paired)
    half = inf if std is None else quantile(pairs, count - 1) * std / sqrt(count)
    low, high, verdict = mean - half, mean + half, "no difference shown"
    if count < LEAST_SEEDS:
        verdict = FEW
    elif low > 0 or high < 0:
        verdict = "better" if (low > 0) == higher else "worse"
    elif margin is not None and -margin < low and high < margin:
        verdict = "equal"
    return Difference(mean, low, high, count, verdict)


def compare_runs(
    scores: Mapping[str, Mapping[int, float]],
    reference: str = "",
    higher: bool = True,
    margin: float | None = None,
    unit: str = "",
) -> Verdicts:
    """Compare mechanisms by ``scores[name][seed]``; those without a score are left out.

    Example:
        >>> runs = {"relu": {s: 90.0 + 0.1 * s for s in range(5)}, "softmax": {s: 80.0 + 0.2 * s for s in range(5)}}
        >>> compare_runs(runs, "softmax", unit=" %").sentences
        ['relu is better than softmax by 9.80 % (9.60 to 10.00).']
    """
    given = {name: runs for name, runs in scores.items() if runs}
    if not given:
        raise ValueError("scores: no mechanism has a score")
    best = (max if higher else min)(given, key=lambda name: fmean(given[name].values()))
    against = reference if reference in given else None
    pairs = len(given) * (len(given) - 1) // 2

    def row(name: str) -> Row:
        values = list(given[name].values())
        to_both = [
            None if other in (None, name) else difference(given[name], given[str(other)], pairs, higher, margin)
            for other in (against, best)
        ]
        return Row(name, fmean(values), deviation(values), min(values), max(values), len(values), *to_both)

    rows = [row(name) for name in given]
    return Verdicts(rows, against, best, _sentences(rows, against, best, unit, margin))


def _sentences(rows: Sequence[Row], reference: str | None, best: str, unit: str, margin: float | None) -> list[str]:
    found = [
        (row.name, other, to)
        for row in rows
        for other, to in ((reference, row.to_reference), (best if best != reference else None, row.to_best))
        if to is not None and other is not None
    ]
    if any(to.verdict == FEW for _, _, to in found):
        return [f"Nothing is claimed of fewer than {LEAST_SEEDS} seeds: intervals show what these leave open."]
    said, groups = [], dict[tuple[str, str], list[str]]()
    for name, other, to in found:
        if to.verdict not in ("better", "worse"):
            groups.setdefault((to.verdict, other), []).append(name)
        elif (name, other) != (reference, best):  # said from the other side
            low, high = sorted((abs(to.low), abs(to.high)))
            said.append(f"{name} is {to.verdict} than {other} by {abs(to.mean):.2f}{unit} ({low:.2f} to {high:.2f}).")
    for (verdict, other), names in groups.items():
        start = f"Equal to {other} within {margin:g}{unit}:" if verdict == "equal" else ""
        said.append(f"{start or f'No difference to {other} is shown for'} {', '.join(names)}.")
    return said
