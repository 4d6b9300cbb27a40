"""A wrong call names the argument that is wrong; so does a wrong call of the contracts themselves."""

import pytest

from linattn import list_mechanisms
from linattn.testing import check_bad_input, check_mechanism


@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str) -> None:
    assert check_bad_input(name)


def test_unknown_contract() -> None:
    with pytest.raises(ValueError, match=r"contracts must be of forms, causality, .* got 'speed'"):
        check_mechanism("elu", ["speed"])


def test_not_a_mechanism() -> None:
    with pytest.raises(TypeError, match="mechanism must be a registered name or a subclass of Mechanism, got 3"):
        check_mechanism(3)


def test_unknown_declaration() -> None:
    with pytest.raises(TypeError, match="colour"):
        check_mechanism("elu", declares={"colour": "blue"})
