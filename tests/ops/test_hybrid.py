"""Hybrid attention: its forms are the definition, a state stands for the past, padding changes nothing."""

import pytest
import torch
import torch.nn.functional as F

from linattn.ops.hybrid import chunked
from linattn.ops.hybrid.types import SalientBudget
from ops.hybrid_cases import FORMS, SETTINGS, assert_same, brute_force, call, change, make, steps

CUT_SETTINGS = [
    "wide_sliding", "two_delays", "ratio", "cap", "sliding_ratio", "sliding_cap", "only_sinks", "one", "divergence",
    "largest_divergence",
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_forms_are_the_definition(setting):
    options = SETTINGS[setting]
    for inputs in (make(27), make(30, seed=1, gate=True, scores="budget" in options)):
        expected = brute_force(inputs, **options)
        for form in FORMS:
            assert_same(call(inputs, impl=form, **options), expected)


def test_blocks_of_chunks_change_nothing(monkeypatch):
    """Blocks of one and of a few chunks: sums are carried over, and with a cap only living tokens are looked at."""
    inputs = make(75, B=1, H=2, H_kv=1, scores=True)
    for setting in ("ratio", "cap", "sliding_cap"):
        expected = call(inputs, impl="reference", **SETTINGS[setting])
        for scores in (1, 3 * 2 * 4 * 60):
            monkeypatch.setattr(chunked, "BLOCK_SCORES", scores)
            assert_same(call(inputs, impl="chunked", **SETTINGS[setting]), expected)


@pytest.mark.parametrize("setting", CUT_SETTINGS)
def test_a_cut_with_the_state_handed_over_changes_nothing(setting):
    """From every form to every other, into pieces and steps; rows are at different places of their chunks."""
    options = SETTINGS[setting]
    inputs = make(34, B=3, gate=True)
    mask = torch.arange(34) >= torch.tensor([0, 3, 10])[:, None]
    whole = call(inputs, impl="reference", key_mask=mask, **options)

    def piece(a, b):
        return change(inputs, lambda x: x[:, :, a:b])

    for first, second in (("chunked", "chunked"), ("reference", "reference"), ("recurrent", "chunked")):
        for cut in (2, 13, 22):
            masks = mask[:, :cut], mask[:, cut:26]
            start = call(piece(0, cut), True, impl=first, key_mask=masks[0], **options)
            more = call(piece(cut, 26), True, impl=second, key_mask=masks[1], initial_state=start.state, **options)
            end, state = steps(piece(26, 34), more.state, **options)
            assert_same(torch.cat([start.output, more.output, end], 2), whole)
            assert state.length.tolist() == [34, 31, 24]


# In bf16 nothing but the output is rounded.
@pytest.mark.parametrize("setting", ["sliding", "two_delays", "ratio", "sliding_cap", "one"])
def test_padding_packing_and_one_by_one_agree(setting):
    """Padding left, right and in between, full of NaN: chunks are counted from the first real token."""
    options, lengths, T = SETTINGS[setting], [5, 26, 1, 17], 26
    inputs = make(T, B=4, gate=True, scores="budget" in options)
    left = torch.arange(T) >= T - torch.tensor(lengths)[:, None]
    right = torch.arange(T) < torch.tensor(lengths)[:, None]
    gaps = torch.rand(4, T, generator=torch.Generator().manual_seed(0)).argsort(-1) < torch.tensor(lengths)[:, None]
    joined = change(inputs, lambda x: torch.cat([x[b : b + 1, :, :n] for b, n in enumerate(lengths)], 2))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    for form in FORMS:
        alone = [call(change(inputs, lambda x, b=b, n=n: x[b : b + 1, :, :n]), impl=form, **options)
                 for b, n in enumerate(lengths)]  # fmt: skip
        packed = call(joined, True, impl=form, cu_seqlens=cu, **options)
        assert_same(packed.output, torch.cat(alone, 2))
        assert packed.state.length.tolist() == lengths
        for mask in (left, right, gaps):

            def spread(x, mask=mask):
                padded = torch.full_like(x, torch.nan).transpose(1, 2)
                padded[mask] = x.transpose(1, 2)[right]
                return padded.transpose(1, 2)

            output = call(change(inputs, spread), impl=form, key_mask=mask, **options)
            assert (output.transpose(1, 2)[~mask] == 0).all()
            for b, own in enumerate(alone):
                assert_same(output[b : b + 1, :, mask[b]], own)


@pytest.mark.parametrize("units", ["row_max", "one"])
@pytest.mark.parametrize("form", FORMS)
def test_without_a_linear_part_it_is_softmax(form, units):
    """Also in the first chunk: no key is there that was not given."""
    inputs, same = make(20, H=2), {"impl": form, "units": units}
    expected = F.scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], is_causal=True)
    assert_same(call(inputs, window=20, **same), expected, 1e-14)
    assert_same(call(inputs, window=10, layout="chunks", **same), expected, 1e-14)
    assert_same(call(inputs, window=4, budget=SalientBudget(1.0, 4), **same), expected, 1e-14)
    assert_same(call(inputs | {"features": None}, window=20, **same), expected, 1e-14)
    empty = inputs | {"features": tuple(x[..., :0] for x in inputs["features"])}
    assert_same(call(empty, window=20, **same), expected, 1e-14)


@pytest.mark.parametrize("units", ["row_max", "one"])
def test_logits_of_any_size_stay_finite(units):
    for size in (0.0, 1e-3, 300.0, -300.0):
        inputs = make(20, dtype=torch.float32, seed=2)
        inputs["q"], inputs["k"] = inputs["q"].abs() * size, inputs["k"].abs()
        for form in FORMS:
            leaves = change(inputs, lambda x: x.clone().requires_grad_())
            output = call(leaves, impl=form, units=units, **SETTINGS["cap"])
            output.sum().backward()
            assert output.isfinite().all()
            assert output.abs().max() <= inputs["v"].abs().max() * (1 + 1e-5)  # a mean of values
            assert all(x.grad.isfinite().all() for x in (leaves["q"], leaves["k"], leaves["v"], *leaves["features"]))


@pytest.mark.parametrize("setting", ["sliding", "two_delays", "cap", "sliding_cap", "one"])
def test_gradients_agree(setting):
    inputs = make(26, gate=True)

    def gradients(form):
        leaves = change(inputs, lambda x: x.clone().requires_grad_())
        call(leaves, impl=form, **SETTINGS[setting]).sin().sum().backward()
        return [leaves[n].grad for n in ("q", "k", "v", "gate")] + [x.grad for x in leaves["features"]]

    expected = gradients("reference")
    assert all(g.abs().max() > 0 for g in expected)
    for form in ("chunked", "recurrent"):
        for a, b in zip(gradients(form), expected, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("form", ["reference", "chunked"])
def test_gradcheck(form):
    inputs = make(7, B=1, H=2, H_kv=1, K=2, V=2, F=2, gate=True)
    options = {"window": 2, "layout": "chunks", "budget": SalientBudget(1 / 2, 2, cap=1), "scores": torch.rand(1, 1, 7)}
    mask = torch.tensor([[False, True, True, True, True, True, True]])

    def run(q, k, v, phi, psi, gate):
        given = {"q": q, "k": k, "v": v, "features": (phi, psi), "gate": gate}
        out = call(given, True, impl=form, key_mask=mask, **options)
        return out.output, out.state.linear.kv, out.state.window.v, out.state.salient.k

    leaves = [inputs["q"], inputs["k"], inputs["v"], *inputs["features"], inputs["gate"]]
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in leaves])


def test_autocast_keeps_sums_and_choices_in_fp32():
    inputs = make(30, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(inputs, True, **SETTINGS["cap"])
    assert out.output.dtype == torch.bfloat16
    assert out.state.linear.kv.dtype == torch.float32
    assert_same(out.output.double(), call(change(inputs, torch.Tensor.double), **SETTINGS["cap"]), 2**-8)


def test_compile():
    """Whole graphs: with a cap no step asks the device how many tokens there are."""
    inputs, options = make(20, dtype=torch.float32), SETTINGS["cap"]
    compiled = torch.compile(lambda x: call(x, **options), fullgraph=True, backend="aot_eager")
    assert_same(compiled(inputs), call(inputs, **options), 1e-6)
    state = call(change(inputs, lambda x: x[:, :, :16]), True, **options).state
    token = change(inputs, lambda x: x[:, :, 16:17])
    compiled = torch.compile(lambda x, s: steps(x, s, **options)[0], fullgraph=True, backend="aot_eager")
    assert_same(compiled(token, state), call(inputs, **options)[:, :, 16:17], 1e-6)
