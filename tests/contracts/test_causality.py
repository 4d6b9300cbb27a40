"""The past never moves when the future changes, and takes no gradient from it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts.drawn import Arguments, calls, gradients, leaves, tensors, tokens
from contracts.op_subjects import COVERING, Variant
from contracts.places import PLACES
from linattn import linear_attention, list_mechanisms
from linattn.testing import check_causality, subject_of

CAUSAL = [replace(variant, causal=True) for variant in COVERING]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list_mechanisms(causal=True))
def test_mechanism(name: str, place: dict[str, Any]) -> None:
    assert check_causality(subject_of(name, **place))


def test_it_does_not_apply_to_the_bidirectional() -> None:
    assert all(check_causality(name) == [] for name in list_mechanisms(causal=False))
    assert check_causality(subject_of("elu", {"causal": False})) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", CAUSAL, ids=str)
def test_op(variant: Variant, place: dict[str, Any]) -> None:
    assert check_causality(variant.at(place))


@given(calls(causal=True), st.data())
def test_op_at_drawn_cuts(arguments: Arguments, data: st.DataObject) -> None:
    """The past computed alone equals the past of the whole, and the future gets no gradient from it."""
    T = arguments["q"].shape[2]
    cut = data.draw(st.integers(1, T))
    own = leaves(arguments)
    past = linear_attention(**own)[:, :, :cut]
    alone = linear_attention(**tokens(arguments, slice(0, cut)))
    # A prefix of another length may be split into other blocks: rounding, not meaning.
    torch.testing.assert_close(past, alone, rtol=1e-10, atol=1e-10)
    found = gradients(past.sum(), own)
    for name, value in tensors(own).items():
        if value.ndim > 1:
            assert not found[name][:, :, cut:].count_nonzero()
