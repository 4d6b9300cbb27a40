"""States, operations and memory grow with the sequence as declared."""

from typing import Any

import pytest

from contracts.op_subjects import COVERING, VARIANTS, Variant
from contracts.places import PLACES, placed
from linattn import list_mechanisms
from linattn.testing import check_scaling, subject_of


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str, place: dict[str, Any]) -> None:
    assert check_scaling(subject_of(name, **place))


@pytest.mark.parametrize(("variant", "place"), placed(VARIANTS, COVERING))
def test_op(variant: Variant, place: dict[str, Any]) -> None:
    assert check_scaling(variant.at(place))
