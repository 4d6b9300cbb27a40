"""What the contracts allow in low precision: where terms cancel, and for what is made token by token."""

import pytest
import torch

from linattn.testing.cases import attend_with_state, subject_of
from linattn.testing.violation import ContractViolation

NAMES = "gradient of q", "gradient of k"


def standard(length: int, **options):
    subject = subject_of("relu", dtype=torch.float32)
    built = subject.build(True)
    return subject.standard(built, subject.inputs(built, length), **options)


def test_a_token_alone_may_keep_the_rounding_of_terms_that_cancel() -> None:
    alone = standard(1)
    assert set(alone.rests) == set(NAMES)
    assert not standard(2).rests
    eps = torch.finfo(torch.float32).eps
    for name in NAMES:
        size = standard(2).expected[name].abs().max().item()
        assert alone.rests[name] == pytest.approx(4 * 16 * eps * size), "two sums over 8 channels"
        found = {**alone.expected, name: alone.expected[name] + alone.rests[name]}
        alone.hold("within", found)
        with pytest.raises(ContractViolation, match=name):
            alone.hold("beyond", {**found, name: alone.expected[name] + 4 * alone.rests[name]})


def test_steps_are_held_to_what_steps_of_plain_pytorch_cost() -> None:
    whole = standard(5, call=attend_with_state)
    steps = standard(5, call=attend_with_state, steps=True)
    assert len(steps.plain) == len(whole.plain) + 1
