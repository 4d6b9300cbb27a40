"""Low precision costs at most twice what plain PyTorch in that precision costs, against fp64."""

import pytest

from contracts.op_subjects import COVERING, Variant
from linattn import list_mechanisms
from linattn.testing import check_precision


@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str) -> None:
    assert check_precision(name)


@pytest.mark.parametrize("variant", COVERING, ids=str)
def test_op(variant: Variant) -> None:
    assert check_precision(variant.subject)
