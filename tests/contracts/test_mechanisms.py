"""Every registered mechanism keeps every contract, on a CPU in fp64 and on a GPU by kernels."""

from collections.abc import Callable
from typing import Any

import pytest

from contracts.places import PLACES
from linattn import list_mechanisms
from linattn.mechanisms.registry import mechanism_info
from linattn.testing import (
    check_bad_input,
    check_causality,
    check_compile,
    check_forms,
    check_gradients,
    check_hand_over,
    check_padding,
    check_poison,
    check_precision,
    check_scaling,
    subject_of,
)

WITH_STATE = [name for name in list_mechanisms(causal=True) if name not in list_mechanisms(state="none")]
CHECKS = {
    check_causality: list_mechanisms(causal=True), check_padding: list_mechanisms(), check_hand_over: WITH_STATE,
    check_precision: list_mechanisms(), check_gradients: list_mechanisms(), check_poison: list_mechanisms(),
    check_scaling: list_mechanisms(),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("check", "name"),
    [pytest.param(check, name, id=f"{check.__name__}-{name}") for check, names in CHECKS.items() for name in names],
)
def test_contract(check: Callable[..., list[str]], name: str, place: dict[str, Any]) -> None:
    assert check(subject_of(name, **place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list_mechanisms())
def test_forms(name: str, place: dict[str, Any]) -> None:
    # A kernel is compiled anew for many a length: on a GPU those of the operators below it are all seen.
    lengths = (1, 65, 197) if place else (1, 2, 64, 65, 197)
    assert check_forms(subject_of(name, **place), lengths=lengths)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_mechanisms())
def test_forms_at_all_lengths(name: str) -> None:
    assert check_forms(name)


@pytest.mark.parametrize("name", list_mechanisms())
def test_bad_input(name: str) -> None:
    assert check_bad_input(name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list_mechanisms())
def test_compile(name: str, place: dict[str, Any]) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("name", list_mechanisms())
def test_compile_with_generated_code(name: str) -> None:
    """The backend users get, and every call in every direction; it needs a C++ compiler on a CPU, and a minute."""
    assert check_compile(name, backend="inductor")


def test_contracts_that_do_not_apply() -> None:
    assert all(check_causality(name) == [] for name in list_mechanisms(causal=False))
    assert check_causality(subject_of("elu", {"causal": False})) == []
    assert all(check_hand_over(name) == [] for name in set(list_mechanisms()) - set(WITH_STATE))
    assert check_hand_over(subject_of("elu", {"state": "none"})) == []
