"""A test of the tests: each contract notices the mistake it is there for, and lets sound mechanisms pass."""

from typing import Any

import pytest

from contracts import broken
from linattn import list_mechanisms
from linattn.mechanisms.base import Mechanism
from linattn.testing import CONTRACTS, ContractViolation, check_mechanism

MISTAKES = [
    ("forms", broken.FormsDiffer, "differs by"),
    ("causality", broken.LeaksOneToken, "past differs by"),
    ("causality", broken.GlobalMaximum, "past differs by"),
    ("padding", broken.MasksOnlyValues, "differs by"),
    ("padding", broken.DecaysOnPadding, "differs by"),
    ("hand_over", broken.ForgetsKeySum, "output differs by"),
    ("hand_over", broken.CutsStateGradient, "gradient of .* differs by"),
    ("precision", broken.ComputesInBfloat16, "fp64 is rounded on the way"),
    ("precision", broken.RoundsOneForm, "torch.float32.*error .*, allowed"),
    ("gradients", broken.DetachesParameter, "slope gets no gradient"),
    ("gradients", broken.NormAtZero, "zero.*gradient of k has .* not finite, allowed 0"),
    ("gradients", broken.WrongGradient, "gradient and slope differ by"),
    ("compile", broken.AsksForNumbers, "item"),
    ("poison", broken.LeavesRowUnwritten, "output has .* not finite, allowed 0"),
    ("scaling", broken.GrowingState, "state_size says 144, found 32"),
    ("scaling", broken.MakesSquareMatrix, "largest tensor goes from .* allowed"),
    ("bad_input", broken.NoLengthCheck, "nothing was raised; allowed: ValueError or TypeError with length"),
]


def test_every_contract_has_a_mistake() -> None:
    assert {contract for contract, _, _ in MISTAKES} == set(CONTRACTS)


@pytest.mark.parametrize(("contract", "mechanism", "message"), MISTAKES, ids=lambda part: getattr(part, "__name__", ""))
def test_the_right_contract_notices(contract: str, mechanism: type[Mechanism], message: str) -> None:
    words = rf"(?s)contract '{contract}' is broken in the case .*{message}"
    with pytest.raises(ContractViolation, match=words) as found:
        check_mechanism(mechanism, [contract])
    assert found.value.contract == contract
    assert found.value.case


@pytest.mark.parametrize(
    ("mechanism", "declares", "message"),
    [
        (broken.TooModest, {"state": "none"}, "a state can be handed over, but state='none' is declared"),
        (broken.Sound, {"state": "growing"}, "state 'growing' is declared, but the sizes .* are"),
        (broken.Sound, {"cost": "quadratic"}, "cost 'quadratic' is declared, but flops go from"),
    ],
)
def test_a_wrong_declaration_is_noticed(mechanism: type[Mechanism], declares: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractViolation, match=message):
        check_mechanism(mechanism, ["scaling"], declares=declares)


def test_a_sound_mechanism_passes_all() -> None:
    report = check_mechanism(broken.SoundWithInput, declares={"uses_input": True})
    assert list(report.counts) == list(CONTRACTS)
    assert all(count > 0 for count in report.counts.values())
    assert "SoundWithInput keeps 10 contracts" in str(report)


def test_one_without_input_passes_where_none_is_given() -> None:
    assert all(check_mechanism(broken.Sound, ["causality", "padding", "hand_over", "gradients"]).counts.values())


def test_checking_a_class_does_not_register_it() -> None:
    before = list_mechanisms()
    check_mechanism(broken.Sound, ["scaling"])
    assert list_mechanisms() == before
    assert not hasattr(broken.Sound, "info")


def test_options_reach_the_constructor() -> None:
    report = check_mechanism(broken.Sound, ["scaling", "forms"], head_dim=5, num_heads=3)
    assert report.mechanism == "Sound"


def test_what_does_not_apply_is_said() -> None:
    report = check_mechanism(broken.Sound, ["causality", "scaling"], declares={"causal": False})
    assert report.counts["causality"] == 0
    assert "causality   does not apply" in str(report)


def test_wrong_calls_of_the_contracts() -> None:
    with pytest.raises(ValueError, match=r"contracts must be of forms, causality, .* got 'speed'"):
        check_mechanism("elu", ["speed"])
    with pytest.raises(TypeError, match="mechanism must be a registered name or a subclass of Mechanism, got 3"):
        check_mechanism(3)
    with pytest.raises(TypeError, match="colour"):
        check_mechanism("elu", declares={"colour": "blue"})
