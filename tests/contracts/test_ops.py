"""``linear_attention`` with every combination of its options keeps the contracts of mechanisms."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from contracts.op_subjects import COVERING, DIRECTIONS, KINDS, VARIANTS, Variant
from contracts.places import GPU, PLACES
from linattn import linear_attention
from linattn.ops.shared.call import FORMS
from linattn.testing import (
    check_causality,
    check_compile,
    check_forms,
    check_gradients,
    check_hand_over,
    check_padding,
    check_poison,
    check_precision,
    check_scaling,
)
from linattn.testing.forms import LENGTHS

CAUSAL = [replace(variant, causal=True) for variant in COVERING]
CHECKS = {
    check_causality: CAUSAL, check_padding: COVERING, check_hand_over: CAUSAL, check_precision: COVERING,
    check_gradients: COVERING, check_compile: KINDS, check_poison: DIRECTIONS,
}  # fmt: skip
GROUPED_BY_THE_CHECK = [variant for variant in VARIANTS if not variant.grouped]


def placed(variants: list[Variant], on_gpu: list[Variant]) -> list[Any]:
    """A variant and a place each: all on the CPU, and fewer on a GPU, where each has kernels of its own to compile."""
    return [pytest.param(variant, {}, id=f"{variant}-cpu") for variant in variants] + [
        pytest.param(variant, GPU, id=f"{variant}-gpu", marks=pytest.mark.gpu) for variant in on_gpu
    ]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("check", "variant"),
    [pytest.param(check, one, id=f"{check.__name__}-{one}") for check, variants in CHECKS.items() for one in variants],
)
def test_contract(check: Callable[..., list[str]], variant: Variant, place: dict[str, Any]) -> None:
    assert check(variant.at(place))


@pytest.mark.parametrize(("variant", "place"), placed(VARIANTS, COVERING))
def test_scaling(variant: Variant, place: dict[str, Any]) -> None:
    assert check_scaling(variant.at(place))


@pytest.mark.parametrize(
    ("variant", "place"), placed(GROUPED_BY_THE_CHECK, [replace(variant, grouped=False) for variant in COVERING])
)
def test_forms_past_one_chunk(variant: Variant, place: dict[str, Any]) -> None:
    assert check_forms(variant.at(place), lengths=(65,))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", DIRECTIONS, ids=str)
def test_forms_at_all_lengths(variant: Variant, place: dict[str, Any]) -> None:
    impls = {"impls": (*FORMS, "auto")} | place
    assert check_forms(variant.at(impls), lengths=[length for length in LENGTHS if length != 65])


@pytest.mark.parametrize("impl", FORMS)
def test_no_tokens_and_no_keys(impl: str) -> None:
    q, nothing = torch.randn(2, 2, 3, 8), torch.zeros(2, 2, 0, 8)
    for causal in (True, False):
        assert linear_attention(nothing, nothing, nothing, causal=causal, impl=impl).shape == (2, 2, 0, 8)
    assert not linear_attention(q, nothing, nothing, impl=impl).count_nonzero()
