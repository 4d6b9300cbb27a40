"""Padding changes nothing: key_mask, cu_seqlens and one sequence at a time agree."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts.drawn import LONGEST, Arguments, calls, gradients, leaves, tokens
from contracts.op_subjects import COVERING, Variant
from contracts.places import PLACES
from linattn import linear_attention, list_mechanisms
from linattn.testing import check_padding, subject_of
from linattn.testing.cases import random_like
from linattn.testing.violation import compare


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list_mechanisms())
def test_mechanism(name: str, place: dict[str, Any]) -> None:
    assert check_padding(subject_of(name, **place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", COVERING, ids=str)
def test_op(variant: Variant, place: dict[str, Any]) -> None:
    assert check_padding(variant.at(place))


@st.composite
def packings(draw: st.DrawFn) -> tuple[Arguments, list[int]]:
    lengths = draw(st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any))
    return draw(calls(length=sum(lengths), batch=1)), [0, *accumulate(lengths)]


@given(packings())
def test_op_on_drawn_packings(packing: tuple[Arguments, list[int]]) -> None:
    arguments, offsets = packing
    own, alone = leaves(arguments), leaves(arguments)
    packed = linear_attention(**own, cu_seqlens=torch.tensor(offsets))
    pieces = [linear_attention(**tokens(alone, slice(s, e))) for s, e in pairwise(offsets) if s < e]
    _same(packed, own, torch.cat(pieces, dim=2), alone)


@given(st.integers(1, LONGEST).flatmap(lambda length: calls(length=length, batch=2)), st.data())
def test_op_on_drawn_masks(arguments: Arguments, data: st.DataObject) -> None:
    """Masked keys are as good as absent, even where they are NaN."""
    Tk = arguments["k"].shape[2]
    seed = data.draw(st.integers(0, 2**16))
    mask = torch.rand(2, Tk, generator=torch.Generator().manual_seed(seed)) < data.draw(st.sampled_from([0.2, 0.9]))
    mask[:, Tk // 2] = True
    padding = ~mask[:, None, :, None]
    garbage = {name: arguments[name].masked_fill(padding, torch.nan) for name in ("k", "v")}
    own, alone = leaves(arguments | garbage), leaves(arguments)
    masked = linear_attention(**own, key_mask=mask).transpose(1, 2)[mask]
    rows = [linear_attention(**tokens(alone, mask[b].nonzero()[:, 0], row=b)) for b in range(2)]
    _same(masked, own, torch.cat([row[0].transpose(0, 1) for row in rows]), alone)


def _same(output: torch.Tensor, own: Arguments, expected: torch.Tensor, alone: Arguments) -> None:
    weight = random_like(output)
    found = {"output": output} | gradients((output * weight).sum(), own)
    compare("padding", "drawn", found, {"output": expected} | gradients((expected * weight).sum(), alone))
