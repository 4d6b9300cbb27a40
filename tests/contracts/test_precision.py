"""Low precision costs at most twice what plain PyTorch in that precision costs, against fp64."""

from typing import Any

import pytest

from contracts.op_subjects import COVERING, Variant
from contracts.places import PLACES
from linattn import list_mechanisms
from linattn.testing import check_precision, subject_of


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str, place: dict[str, Any]) -> None:
    assert check_precision(subject_of(name, **place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", COVERING, ids=str)
def test_op(variant: Variant, place: dict[str, Any]) -> None:
    assert check_precision(variant.at(place))
