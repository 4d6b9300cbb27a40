"""Every input and every parameter gets a gradient that is finite, not zero and equal to the slope."""

from typing import Any

import pytest

from contracts.op_subjects import COVERING, Variant
from contracts.places import PLACES
from linattn import list_mechanisms
from linattn.testing import check_gradients, subject_of


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str, place: dict[str, Any]) -> None:
    assert check_gradients(subject_of(name, **place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", COVERING, ids=str)
def test_op(variant: Variant, place: dict[str, Any]) -> None:
    assert check_gradients(variant.at(place))
