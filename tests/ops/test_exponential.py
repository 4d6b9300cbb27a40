"""Exponential attention: its forms agree, and all are the unstabilised recurrence."""

import pytest
import torch

from linattn import exponential_attention_step
from linattn.ops.exponential.call import ExponentialState
from ops.exponential_cases import F64, FORMS, LENGTHS, assert_same, call, cast, leaves, make, results, some_mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", LENGTHS)
def test_forms_agree(form, T):
    inputs = make(T)
    assert_same(results(inputs, impl=form), results(inputs, impl="reference"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 65, 197])
@pytest.mark.parametrize("state", [True, False])
def test_forms_agree_under_a_mask(form, T, state):
    inputs, mask = make(T, state=state), some_mask(T)
    assert_same(results(inputs, impl=form, key_mask=mask), results(inputs, impl="reference", key_mask=mask))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("state", [True, False])
def test_forms_agree_on_packed_sequences(form, masked, state):
    cu = torch.tensor([0, 0, 3, 68, 68, 69, 132, 132])
    inputs = make(132, B=1, n=7, state=state)
    mask = some_mask(132)[:1] if masked else None
    options = {"cu_seqlens": cu, "key_mask": mask}
    assert_same(results(inputs, impl=form, **options), results(inputs, impl="reference", **options))


@pytest.mark.parametrize("form", ["reference", *FORMS])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_it_is_the_unstabilised_recurrence(form, scale):
    """C_t, n_t and the division as in the formulas, without any maximum; autograd gives the gradients."""
    inputs = make(40, H=2, H_kv=2)

    def plain(q, k, v, i, f, kv, n, m):
        kv, n = m.exp()[..., None, None] * kv, m.exp()[..., None] * n
        q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
        outputs = []
        for t in range(q.shape[2]):
            written = i[:, :, t].exp()[..., None] * k[:, :, t]
            kv = f[:, :, t].exp()[..., None, None] * kv + torch.einsum("bhk,bhv->bhkv", written, v[:, :, t])
            n = f[:, :, t].exp()[..., None] * n + written
            denominator = torch.einsum("bhk,bhk->bh", q[:, :, t], n).abs().clamp(min=1)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], kv) / denominator[..., None])
        return torch.stack(outputs, dim=2), kv, n

    tensors = [x.clone().requires_grad_() for x in leaves(inputs)]
    output, kv, n = plain(*tensors)
    g = torch.Generator().manual_seed(99)
    weights = [torch.randn(x.shape, generator=g, dtype=F64) for x in (output, kv, n)]
    loss = sum((x * w).sum() for x, w in zip((output, kv, n), weights, strict=True))
    gradients = torch.autograd.grad(loss, tensors)
    found_output, found_kv, found_k, log_scale, *found_gradients = results(inputs, impl=form, scale=scale)
    unit = log_scale.exp()
    found = [found_output, unit[..., None, None] * found_kv, unit[..., None] * found_k, *found_gradients]
    assert_same(found, [output.detach(), kv.detach(), n.detach(), *gradients])


@pytest.mark.parametrize("form", ["reference", *FORMS])
@pytest.mark.parametrize("cut", [0, 1, 64, 99, 100])
def test_a_cut_with_the_state_handed_over_changes_nothing(form, cut):
    inputs = make(100)
    whole = call(inputs, impl=form)
    first = {name: x if name == "initial_state" else x[:, :, :cut] for name, x in inputs.items()}
    start = call(first, impl=form)
    second = {name: start.state if name == "initial_state" else x[:, :, cut:] for name, x in inputs.items()}
    end = call(second, impl=form)
    assert_same([torch.cat([start.output, end.output], 2), *end.state], [whole.output, *whole.state], 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-5)])
def test_step_by_step(dtype, tolerance):
    inputs = make(70, state=False, dtype=dtype)
    # A unit whose rounding alone, once per step, would cost digits in fp32; a slow decay lets errors add up.
    inputs["log_input"], inputs["log_decay"] = inputs["log_input"] + 1000, inputs["log_decay"] / 100
    inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()
    whole = call(cast(inputs, F64), impl="reference")
    state, outputs = None, []
    for t in range(70):
        q, k, v, i, f = (inputs[name][:, :, t] for name in inputs)
        out = exponential_attention_step(q, k, v, state, log_input=i, log_decay=f)
        outputs.append(out.output)
        state = out.state
    assert all(x.dtype == dtype for x in (*outputs, *state))
    assert_same([torch.stack(outputs, 2).double()], [whole.output], tolerance)
    unit = (state.log_scale.double() - whole.state.log_scale).exp()
    found = [unit[..., None, None] * state.kv, unit[..., None] * state.k]
    assert_same(found, [whole.state.kv, whole.state.k], tolerance)


def test_gradients_cross_a_cut():
    inputs = make(30, B=1)
    tensors = [x.requires_grad_() for x in leaves(inputs)]
    whole = torch.autograd.grad(call(inputs).output.sin().sum(), tensors)
    first = {name: x if name == "initial_state" else x[:, :, :11] for name, x in inputs.items()}
    start = call(first)
    second = {name: start.state if name == "initial_state" else x[:, :, 11:] for name, x in inputs.items()}
    cut = torch.autograd.grad(start.output.sin().sum() + call(second).output.sin().sum(), tensors)
    assert_same(cut, whole)


@pytest.mark.parametrize("form", ["reference", *FORMS])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("offsets", [None, [0, 0, 0], [0, 0, 4], [0, 7, 7]])
def test_the_unit_of_a_returned_state_is_a_constant(form, dtype, offsets):
    """Of an empty sequence too: the gradient of what it hands on reaches its first unit through the sums."""
    T = offsets[-1] if offsets else 0
    inputs = make(T, B=1 if offsets else 2, n=2, dtype=dtype)
    initial = [x.requires_grad_() for x in inputs["initial_state"]]
    kv, k, unit = call(inputs, impl=form, cu_seqlens=torch.tensor(offsets) if offsets else None).state
    assert not unit.requires_grad
    empty = torch.tensor(offsets).diff() == 0 if offsets else torch.tensor([True, True])
    for found, given in zip((kv, k, unit), initial, strict=True):
        assert torch.equal(found[empty], given[empty])
    weights = torch.randn(kv.shape).to(dtype), torch.randn(k.shape).to(dtype)
    found = torch.autograd.grad((kv * weights[0]).sum() + (k * weights[1]).sum(), initial)
    with torch.no_grad():
        expected = *weights, (weights[0] * kv).sum((2, 3)) + (weights[1] * k).sum(2)
    assert_same([x[empty] for x in found], [x[empty] for x in expected], 1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_padding_packing_and_one_by_one_agree(form):
    lengths, T = [5, 70, 0, 33], 70
    inputs = make(T, B=4, state=False)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    poisoned = {n: x if n == "q" else x.transpose(1, 2).clone() for n, x in inputs.items()}
    for n in poisoned.keys() - {"q"}:
        poisoned[n][~mask] = torch.nan  # padding may hold anything
        poisoned[n] = poisoned[n].transpose(1, 2)
    padded = call(poisoned, impl=form, key_mask=mask)
    packed = {
        n: torch.cat([x[b : b + 1, :, :length] for b, length in enumerate(lengths)], 2) for n, x in inputs.items()
    }
    joined = call(packed, impl=form, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    begin = 0
    for b, length in enumerate(lengths):
        alone = call({n: x[b : b + 1, :, :length] for n, x in inputs.items()}, impl=form)
        rows = [x[b : b + 1] for x in padded.state]
        assert_same([padded.output[b : b + 1, :, :length], *rows], [alone.output, *alone.state], 1e-12)
        rows = [x[b : b + 1] for x in joined.state]
        assert_same([joined.output[:, :, begin : begin + length], *rows], [alone.output, *alone.state], 1e-12)
        begin += length


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_the_past_never_moves_when_the_future_changes(form):
    inputs, other = make(90), make(90, seed=1)
    inputs["log_input"][:, :, 60:] += 50
    changed = {
        n: x if n == "initial_state" else torch.cat([x[:, :, :60], other[n][:, :, 60:]], 2) for n, x in inputs.items()
    }
    before, after = call(inputs, impl=form).output, call(changed, impl=form).output
    torch.testing.assert_close(before[:, :, :60], after[:, :, :60], rtol=1e-13, atol=1e-13)
    assert not torch.allclose(before[:, :, 60:], after[:, :, 60:])


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_gradcheck(form):
    inputs = make(5, B=1, H=2, H_kv=1, K=2, V=2)
    names = [n for n in inputs if n != "initial_state"]
    mask = torch.tensor([[True, False, True, True, True]])

    def run(*tensors):
        state = ExponentialState(*tensors[5:])
        out = call({**dict(zip(names, tensors[:5], strict=True)), "initial_state": state}, impl=form, key_mask=mask)
        unit = out.state.log_scale.exp()
        return out.output, unit[..., None, None] * out.state.kv, unit[..., None] * out.state.k

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in leaves(inputs)])
