"""``torch.compile(fullgraph=True)`` gives what eager gives."""

import pytest

from contracts.op_subjects import DIRECTIONS, Variant
from linattn import list_mechanisms
from linattn.testing import check_compile


@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str) -> None:
    assert check_compile(name)


@pytest.mark.parametrize("variant", DIRECTIONS, ids=str)
def test_op(variant: Variant) -> None:
    assert check_compile(variant.subject)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism_with_generated_code(name: str) -> None:
    """The backend users get; it needs a C++ compiler on a CPU, and a minute."""
    assert check_compile(name, backend="inductor")
