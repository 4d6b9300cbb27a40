"""``torch.compile(fullgraph=True)`` gives what eager gives."""

from typing import Any

import pytest

from contracts.op_subjects import KINDS, Variant
from contracts.places import PLACES
from linattn import list_mechanisms
from linattn.mechanisms.registry import mechanism_info
from linattn.testing import check_compile, subject_of


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str, place: dict[str, Any]) -> None:
    """What is no repetition.

    Masks and packing reach the same code of a mechanism in both directions: they are traced in one. What a mechanism
    can do that breaks a graph shows in every call, what it can do that breaks the gradient's graph in two of them; the
    operators below it are traced through all.
    """
    one_way = subject_of(name, {"causal": not mechanism_info(name).bidirectional}, **place)
    assert check_compile(one_way, calls=("masked",))
    assert check_compile(one_way, backend="eager", calls=("packed",))
    if subject_of(name).has_state:
        causal = subject_of(name, {"bidirectional": False}, **place)
        assert check_compile(causal, calls=("with state",))
        assert check_compile(causal, backend="eager", calls=("step",))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", KINDS, ids=str)
def test_op(variant: Variant, place: dict[str, Any]) -> None:
    assert check_compile(variant.at(place))


@pytest.mark.slow
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism_with_generated_code(name: str) -> None:
    """The backend users get, and every call in every direction; it needs a C++ compiler on a CPU, and a minute."""
    assert check_compile(name, backend="inductor")
