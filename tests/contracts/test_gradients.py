"""Every input and every parameter gets a gradient that is finite, not zero and equal to the slope."""

import pytest

from contracts.op_subjects import COVERING, Variant
from linattn import list_mechanisms
from linattn.testing import check_gradients


@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str) -> None:
    assert check_gradients(name)


@pytest.mark.parametrize("variant", COVERING, ids=str)
def test_op(variant: Variant) -> None:
    assert check_gradients(variant.subject)
