"""States, operations and memory grow with the sequence as declared."""

import pytest

from contracts.op_subjects import VARIANTS, Variant
from linattn import list_mechanisms
from linattn.testing import check_scaling


@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str) -> None:
    assert check_scaling(name)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_op(variant: Variant) -> None:
    assert check_scaling(variant.subject)
