"""``linear_attention`` on drawn shapes: forms agree, the past never moves, cuts, packing and masks change nothing."""

from itertools import accumulate, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts.drawn import LONGEST, Arguments, calls, gradients, leaves, tensors, tokens
from linattn import linear_attention, linear_attention_with_state
from linattn.ops.shared.call import FORMS
from linattn.ops.shared.types import LinearState
from linattn.testing.cases import random_like
from linattn.testing.violation import compare


@given(calls())
def test_forms(arguments: Arguments) -> None:
    results = {}
    for impl in FORMS:
        own = leaves(arguments)
        output = linear_attention(**own, impl=impl)
        results[impl] = {"output": output} | gradients((output * random_like(output)).sum(), own)
    for impl in ("recurrent", "chunked"):
        compare(impl, results[impl], results["reference"])


@given(calls(causal=True), st.data())
def test_the_past_alone_is_the_past_of_the_whole(arguments: Arguments, data: st.DataObject) -> None:
    """And the future gets no gradient from it."""
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


@given(calls(causal=True), st.lists(st.integers(0, 140), max_size=4), st.data())
def test_hand_over_at_any_cuts(arguments: Arguments, places: list[int], data: st.DataObject) -> None:
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
    compare(f"cut at {cuts}", results[1], results[0])


@st.composite
def packings(draw: st.DrawFn) -> tuple[Arguments, list[int]]:
    lengths = draw(st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any))
    return draw(calls(length=sum(lengths), batch=1)), [0, *accumulate(lengths)]


@given(packings())
def test_packed_is_one_by_one(packing: tuple[Arguments, list[int]]) -> None:
    arguments, offsets = packing
    own, alone = leaves(arguments), leaves(arguments)
    packed = linear_attention(**own, cu_seqlens=torch.tensor(offsets))
    pieces = [linear_attention(**tokens(alone, slice(s, e))) for s, e in pairwise(offsets) if s < e]
    _same(packed, own, torch.cat(pieces, dim=2), alone)


@given(st.integers(1, LONGEST).flatmap(lambda length: calls(length=length, batch=2)), st.data())
def test_masked_is_absent(arguments: Arguments, data: st.DataObject) -> None:
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
    compare("drawn", found, {"output": expected} | gradients((expected * weight).sum(), alone))
