"""All forms are one function: values, states and every gradient, in fp64 to 1e-10."""

from typing import Any

import pytest
import torch
from hypothesis import given

from contracts.drawn import Arguments, calls, gradients, leaves
from contracts.op_subjects import COVERING_UNGROUPED, DIRECTIONS, UNGROUPED, Variant
from contracts.places import PLACES, placed
from linattn import linear_attention, list_mechanisms
from linattn.ops.shared.call import FORMS
from linattn.testing import check_forms, subject_of
from linattn.testing.cases import random_like
from linattn.testing.forms import LENGTHS
from linattn.testing.violation import compare


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str, place: dict[str, Any]) -> None:
    # A kernel is compiled anew for many a length: on a GPU those of the operators below it are all seen.
    lengths = (1, 65, 197) if place else (1, 2, 64, 65, 197)
    assert check_forms(subject_of(name, **place), lengths=lengths)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism_at_all_lengths(name: str) -> None:
    assert check_forms(name)


@pytest.mark.parametrize(("variant", "place"), placed(UNGROUPED, COVERING_UNGROUPED))
def test_op_past_one_chunk(variant: Variant, place: dict[str, Any]) -> None:
    assert check_forms(variant.at(place), lengths=(65,))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", DIRECTIONS, ids=str)
def test_op_at_all_lengths(variant: Variant, place: dict[str, Any]) -> None:
    impls = {"impls": (*FORMS, "auto")} | place
    assert check_forms(variant.at(impls), lengths=[length for length in LENGTHS if length != 65])


@given(calls())
def test_op_on_drawn_shapes(arguments: Arguments) -> None:
    results = {}
    for impl in ("reference", "recurrent", "chunked"):
        own = leaves(arguments)
        output = linear_attention(**own, impl=impl)
        results[impl] = {"output": output} | gradients((output * random_like(output)).sum(), own)
    for impl in ("recurrent", "chunked"):
        compare("forms", impl, results[impl], results["reference"])


@pytest.mark.parametrize("impl", ["reference", "recurrent", "chunked"])
@pytest.mark.parametrize("causal", [True, False])
def test_no_tokens_give_no_output(impl: str, causal: bool) -> None:
    nothing = torch.zeros(2, 2, 0, 8)
    assert linear_attention(nothing, nothing, nothing, causal=causal, impl=impl).shape == (2, 2, 0, 8)


@pytest.mark.parametrize("impl", ["reference", "recurrent", "chunked"])
def test_a_query_without_keys_gets_zero(impl: str) -> None:
    q, nothing = torch.randn(2, 2, 3, 8), torch.zeros(2, 2, 0, 8)
    assert not linear_attention(q, nothing, nothing, impl=impl).count_nonzero()
