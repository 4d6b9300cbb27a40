"""What is claimed of several seeds: how often it is wrong on equal mechanisms, and how often a difference is seen."""

import numpy as np
import pytest

from linattn.lab.statistics import LEAST_SEEDS, compare_runs, difference

DRAWS = 2000
CLAIMS = ("better", "worse")


def runs_of(table: np.ndarray) -> dict[str, dict[int, float]]:
    return {f"m{i}": dict(enumerate(row.tolist())) for i, row in enumerate(table)}


def claims(table: np.ndarray, margin: float | None = None) -> list[str]:
    rows = compare_runs(runs_of(table), "m0", margin=margin).rows
    return [found.verdict for row in rows for found in (row.to_reference, row.to_best) if found]


@pytest.mark.parametrize("tails", ["normal", "heavy"])
@pytest.mark.parametrize("count", [5, 7, 12])
def test_equal_mechanisms_are_rarely_told_apart(count, tails):
    """In 95 % of comparisons not one difference is claimed, whatever the number of mechanisms."""
    draws = np.random.default_rng(count)
    shape = (DRAWS, count, LEAST_SEEDS)
    tables = draws.normal(size=shape) if tails == "normal" else draws.standard_t(3, size=shape)
    wrong = sum(any(verdict in CLAIMS for verdict in claims(table)) for table in tables)
    assert wrong / DRAWS <= 0.05 + 2 * (0.05 * 0.95 / DRAWS) ** 0.5


@pytest.mark.parametrize("count", [5, 7, 12])
def test_a_shift_of_eight_deviations_is_seen(count):
    draws = np.random.default_rng(count)
    seen = 0
    for table in draws.normal(size=(300, count, LEAST_SEEDS)):
        table[1] += 8
        row = compare_runs(runs_of(table), "m0").rows[1]
        seen += row.to_reference.verdict == "better"
    assert seen >= 0.8 * 300


def test_equality_needs_a_margin_and_enough_seeds():
    table = 90 + np.random.default_rng(0).normal(size=(2, 30))
    assert set(claims(table)) == {"no difference shown"}
    assert set(claims(table, margin=2.0)) == {"equal"}
    assert set(claims(table, margin=0.01)) == {"no difference shown"}
    assert set(claims(table[:, : LEAST_SEEDS - 1], margin=100.0)) == {"too few seeds"}
    few, enough = (compare_runs(runs_of(table[:, :count])).sentences for count in (LEAST_SEEDS - 1, 30))
    assert [said[0].startswith("Nothing is claimed") for said in (few, enough)] == [True, False]


def test_luck_that_seeds_share_cancels():
    """Two mechanisms whose scores rise and fall together differ by little more than their own noise."""
    draws = np.random.default_rng(1)
    luck, noise = draws.normal(size=5) * 20, draws.normal(size=(2, 5)) * 0.1
    found = difference(dict(enumerate(luck + noise[0] + 2)), dict(enumerate(luck + noise[1])), pairs=1)
    assert found.verdict == "better"
    assert found.low < 2 < found.high


def test_pairs_without_a_common_seed_and_lower_scores_as_better():
    assert difference({0: 1.0}, {1: 2.0}, pairs=1) is None
    losses = {"a": {s: 1.0 + s / 100 for s in range(5)}, "b": {s: 2.0 + s / 90 for s in range(5)}}
    verdicts = compare_runs(losses, "b", higher=False)
    assert verdicts.best == "a"
    assert verdicts.rows[0].to_reference.verdict == "better"
    assert verdicts.rows[1].to_reference is None
    with pytest.raises(ValueError, match="scores"):
        compare_runs({"a": {}})
