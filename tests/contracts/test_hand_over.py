"""Cut anywhere, pass the state: the same outputs, the same final state, and gradients through the state."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts.drawn import Arguments, calls, leaves, tensors, tokens
from contracts.op_subjects import COVERING, Variant
from contracts.places import PLACES
from linattn import linear_attention_with_state, list_mechanisms
from linattn.ops.shared.types import LinearState
from linattn.testing import check_hand_over, subject_of
from linattn.testing.cases import random_like
from linattn.testing.violation import compare

CAUSAL = [replace(variant, causal=True) for variant in COVERING]
WITH_STATE = [name for name in list_mechanisms(causal=True) if name not in list_mechanisms(state="none")]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", WITH_STATE)
def test_mechanism(name: str, place: dict[str, Any]) -> None:
    assert check_hand_over(subject_of(name, **place))


def test_it_does_not_apply_without_state() -> None:
    assert all(check_hand_over(name) == [] for name in set(list_mechanisms()) - set(WITH_STATE))
    assert check_hand_over(subject_of("elu", {"state": "none"})) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", CAUSAL, ids=str)
def test_op(variant: Variant, place: dict[str, Any]) -> None:
    assert check_hand_over(variant.at(place))


@given(calls(causal=True), st.lists(st.integers(0, 140), max_size=4), st.data())
def test_op_at_drawn_cuts(arguments: Arguments, places: list[int], data: st.DataObject) -> None:
    """From a state that is not empty, in pieces of which some may be empty."""
    B, H, T, K = arguments["k"].shape
    V = arguments["v"].shape[3]
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    start = LinearState(
        torch.rand(B, H, K, V, generator=g, dtype=torch.float64), torch.rand(B, H, K, generator=g, dtype=torch.float64)
    )
    cuts = sorted({min(place, T) for place in places} | {0, T})
    results = []
    for bounds in ([0, T], cuts):
        own, state = leaves(arguments), LinearState(*(t.clone().requires_grad_() for t in start))
        last, outputs = state, []
        for s, e in pairwise(bounds):
            output, last = linear_attention_with_state(**tokens(own, slice(s, e)), initial_state=last)
            outputs.append(output)
        found = {"output": torch.cat(outputs, dim=2), "kv": last.kv, "k": last.k}
        loss = sum((t * random_like(t)).sum() for t in found.values())
        wanted = tensors(own) | {"initial kv": state.kv, "initial k": state.k}
        given_back = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True, allow_unused=True)
        results.append(found | dict(zip(wanted, given_back, strict=True)))
    compare("hand_over", f"cut at {cuts}", results[1], results[0])
