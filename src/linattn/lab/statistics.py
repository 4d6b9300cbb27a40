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
from typing import Literal, NamedTuple

LEAST_SEEDS = 5
LEVEL = 0.95

Verdict = Literal["better", "worse", "equal", "no difference shown", "too few seeds"]


class Difference(NamedTuple):
    """Mean difference of two mechanisms, its simultaneous interval, and what it shows."""

    mean: float
    low: float
    high: float
    seeds: int
    verdict: Verdict


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


def interval(differences: Sequence[float], pairs: int) -> tuple[float, float, float]:
    """Mean of paired differences with the bounds of its interval, where ``pairs`` intervals are to hold at once."""
    middle = fmean(differences)
    if len(differences) < 2:
        return middle, -inf, inf
    half = quantile(pairs, len(differences) - 1) * deviation(differences) / sqrt(len(differences))
    return middle, middle - half, middle + half


@cache
def quantile(pairs: int, freedom: int) -> float:
    """``t_{1 - 0.05 / (2 pairs)}`` with ``freedom`` degrees."""
    from scipy.stats import t

    return float(t.ppf(1 - (1 - LEVEL) / (2 * pairs), freedom))


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation."""
    middle = fmean(values)
    return sqrt(fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def difference(
    scores: Mapping[int, float],
    others: Mapping[int, float],
    pairs: int,
    higher: bool = True,
    margin: float | None = None,
) -> Difference | None:
    """``scores - others`` by common seeds; None if they have none in common.

    ``higher``: whether a higher score is better. ``margin``: the difference that counts as none, named beforehand.

    Example:
        >>> a, b = {s: 90 + 0.1 * s for s in range(5)}, {s: 80 + 0.2 * s for s in range(5)}
        >>> difference(a, b, pairs=1).verdict
        'better'
    """
    common = sorted(scores.keys() & others.keys())
    if not common:
        return None
    middle, low, high = interval([scores[seed] - others[seed] for seed in common], pairs)
    verdict: Verdict = "no difference shown"
    if len(common) < LEAST_SEEDS:
        verdict = "too few seeds"
    elif low > 0 or high < 0:
        verdict = "better" if (low > 0) == higher else "worse"
    elif margin is not None and -margin < low and high < margin:
        verdict = "equal"
    return Difference(middle, low, high, len(common), verdict)


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
    pairs = max(len(given) * (len(given) - 1) // 2, 1)

    def to(name: str, other: str | None) -> Difference | None:
        return None if other in (None, name) else difference(given[name], given[str(other)], pairs, higher, margin)

    rows = [
        Row(
            name,
            fmean(runs.values()),
            deviation(list(runs.values())) if len(runs) > 1 else None,
            min(runs.values()),
            max(runs.values()),
            len(runs),
            to(name, against),
            to(name, best),
        )
        for name, runs in given.items()
    ]
    return Verdicts(rows, against, best, _sentences(rows, against, best, unit, margin))


def _sentences(rows: Sequence[Row], reference: str | None, best: str, unit: str, margin: float | None) -> list[str]:
    if len(rows) < 2:
        return []
    if any(found.verdict == "too few seeds" for row in rows for found in (row.to_reference, row.to_best) if found):
        return [f"Nothing is claimed of fewer than {LEAST_SEEDS} seeds: intervals show what these leave open."]
    said, groups = [], dict[tuple[str, str], list[str]]()
    for row in rows:
        for other, found in ((reference, row.to_reference), (best, row.to_best)):
            if found is None or other is None or (other == best == reference and found is row.to_best):
                continue
            if found.verdict in ("better", "worse"):
                low, high = sorted((abs(found.low), abs(found.high)))
                size = f"{abs(found.mean):.2f}{unit} ({low:.2f} to {high:.2f})"
                if not (other == best and row.name == reference):  # said from the other side
                    said.append(f"{row.name} is {found.verdict} than {other} by {size}.")
            else:
                groups.setdefault((found.verdict, other), []).append(row.name)
    for (verdict, other), names in groups.items():
        words = (
            f"No difference to {other} is shown for"
            if verdict != "equal"
            else f"Equal to {other} within {margin:g}{unit}:"
        )
        said.append(f"{words} {', '.join(names)}.")
    return said
