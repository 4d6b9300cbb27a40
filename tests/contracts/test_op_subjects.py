"""The list that stands for all combinations of options leaves out no pair of values."""

from dataclasses import astuple, fields
from itertools import combinations

from contracts.op_subjects import COVERING, DIRECTIONS, KINDS, VARIANTS, Variant


def _pairs(variants: list[Variant]) -> set[tuple[int, int, object, object]]:
    rows = [astuple(variant) for variant in variants]
    return {(i, j, row[i], row[j]) for row in rows for i, j in combinations(range(len(row)), 2)}


def test_covering_meets_every_pair() -> None:
    assert _pairs(COVERING) == _pairs(VARIANTS)
    assert len(set(VARIANTS)) == len(VARIANTS) == 140


def test_directions_are_every_decay_both_ways() -> None:
    key = {(v.causal, v.decay, v.decay_index) for v in DIRECTIONS}
    assert key == {(v.causal, v.decay, v.decay_index) for v in VARIANTS}


def test_kinds_are_every_kind_of_decay_both_ways_and_every_value_of_the_rest() -> None:
    assert {(v.causal, v.decay) for v in KINDS} == {(v.causal, v.decay) for v in VARIANTS}
    for option in fields(Variant):
        assert {getattr(v, option.name) for v in KINDS} == {getattr(v, option.name) for v in VARIANTS}
