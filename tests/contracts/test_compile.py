"""``torch.compile(fullgraph=True)`` gives what eager gives."""

from typing import Any

import pytest

from contracts.op_subjects import DIRECTIONS, Variant
from contracts.places import PLACES
from linattn import list_mechanisms
from linattn.testing import check_compile, subject_of


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str, place: dict[str, Any]) -> None:
    assert check_compile(subject_of(name, **place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", DIRECTIONS, ids=str)
def test_op(variant: Variant, place: dict[str, Any]) -> None:
    assert check_compile(variant.at(place))


@pytest.mark.slow
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism_with_generated_code(name: str) -> None:
    """The backend users get; it needs a C++ compiler on a CPU, and a minute."""
    assert check_compile(name, backend="inductor")
