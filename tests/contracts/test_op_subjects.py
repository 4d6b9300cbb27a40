"""The list that stands for all combinations of options leaves out no pair of values."""

from dataclasses import astuple
from itertools import combinations

from contracts.op_subjects import COVERING, DIRECTIONS, VARIANTS, Variant


def _pairs(variants: list[Variant]) -> set[tuple[int, int, object, object]]:
    rows = [astuple(variant) for variant in variants]
    return {(i, j, row[i], row[j]) for row in rows for i, j in combinations(range(len(row)), 2)}


def test_covering_meets_every_pair() -> None:
    assert _pairs(COVERING) == _pairs(VARIANTS)


def test_directions_are_every_decay_both_ways() -> None:
    key = {(v.causal, v.decay, v.decay_index) for v in DIRECTIONS}
    assert key == {(v.causal, v.decay, v.decay_index) for v in VARIANTS}


def test_no_variant_is_listed_twice() -> None:
    assert len(set(VARIANTS)) == len(VARIANTS) == 140
