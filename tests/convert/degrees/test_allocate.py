"""Budgets of feature dimensions: properties over drawn values, and the cases by hand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn.convert.degrees.measure import allocate

values = st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=40).map(lambda found: dict(enumerate(found)))


@settings(max_examples=60, deadline=None)
@given(values, st.integers(1, 320), st.sampled_from((None, 1, 8, 16)))
def test_every_budget_is_spent_within_the_limits_and_in_order(values, cost, multiple):
    cost = max(cost, multiple or 1)
    dims = allocate(values, cost, multiple=multiple)
    multiple = multiple or min(16, cost)
    assert dims.keys() == values.keys()
    assert all(dim % multiple == 0 and dim >= multiple for dim in dims.values())
    assert sum(dims.values()) == cost * len(values) // multiple * multiple  # the cost of the same for all
    ordered = sorted(values, key=lambda layer: values[layer])
    pairs = [(a, b) for a, b in pairwise(ordered) if values[a] < values[b]]
    assert all(dims[a] <= dims[b] for a, b in pairs)  # of equal ones, one may get what is left


@settings(max_examples=40, deadline=None)
@given(values, st.integers(1, 20))
def test_unclipped_layers_are_proportional_to_their_values(values, cost):
    dims = allocate(values, 16 * cost, multiple=1)
    free = [layer for layer, dim in dims.items() if dim > 1]
    ratios = [(dims[layer] / values[layer], 1 / values[layer]) for layer in free]
    # One factor t for all: t N lies within one unit of each dimension.
    assert not ratios or max(r - u for r, u in ratios) <= min(r + u for r, u in ratios) * (1 + 1e-9)


def test_equal_values_get_equal_dimensions_and_a_rest_stays_unused():
    assert allocate({3: 2.0, 5: 2.0}, 64) == {3: 64, 5: 64}
    assert allocate({0: 1.0, 1: 1.0, 2: 1.0}, 23) == {0: 32, 1: 16, 2: 16}  # 69 is no multiple of 16


def test_values_that_differ_by_many_orders_do_not_overflow():
    assert allocate({0: 1e-300, 1: 1e300}, 64) == {0: 16, 1: 112}
    with pytest.raises(ValueError, match="finite and > 0, got nan for layer 0"):
        allocate({0: float("nan")}, 64)


PUBLISHED = (130, 182, 35, 44, 42, 65, 92, 33, 28, 34, 46, 39)  # of GPT-2, whose heads have 64 dimensions


def test_clipped_dimensions_of_gpt2_are_those_of_the_paper():
    """In proportion to them their mean is the budget again, 64; what lies above 64 is saved: 46.4 are left of it."""
    degrees = dict(enumerate(map(float, PUBLISHED)))
    shared = allocate(degrees, 64, multiple=1)
    assert max(abs(shared[layer] - dim) for layer, dim in enumerate(PUBLISHED)) <= 1
    clipped = allocate(degrees, 64, multiple=1, clip=64)
    assert list(clipped.values()) == [min(dim, 64) for dim in PUBLISHED]
    assert sum(clipped.values()) / 12 == pytest.approx(46.4, abs=0.05)
