"""Exponential attention: the unstabilised recurrence, gates of any size, the unit of a state, wrong calls."""

import pytest
import torch

from linattn import exponential_attention_step
from linattn.ops.shared.types import LinearState
from ops import exponential_cases
from ops.exponential_cases import F64, FORMS, call, cast, leaves, make, true_results
from ops.test_ops_with_state import assert_same, results


def all_results(inputs, **options):
    return results(exponential_cases, inputs, **options)


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
    found = all_results(inputs, impl=form, scale=scale)
    assert_same(found, [output.detach(), kv.detach(), n.detach(), *gradients])


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-5)])
def test_steps_keep_the_digits_of_a_large_unit(dtype, tolerance):
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
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("gate", ["high", "low", "mixed", "rising", "falling"])
@pytest.mark.parametrize("zero_queries", [True, False])
def test_extreme_gates_stay_finite(form, dtype, gate, zero_queries):
    T = 80
    inputs = make(T, dtype=dtype, state=False)
    t = torch.arange(T, dtype=dtype)
    noise = inputs["log_input"]
    inputs["log_input"] = {
        "high": noise + 200,
        "low": noise - 200,
        "mixed": 200 * noise.sign(),
        "rising": noise + 5 * t - 200,
        "falling": noise + 200 - 5 * t,
    }[gate].contiguous()
    inputs["log_decay"] = torch.where(torch.rand(2, 2, T) < 0.2, -200.0, inputs["log_decay"]).to(dtype)
    if zero_queries:
        inputs["q"][:, :, ::2] = 0
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, :10] = False
    mask[1] = False
    tracked = {n: x.requires_grad_() for n, x in inputs.items()}
    output, state = call(tracked, impl=form, key_mask=mask)
    assert all(bool(x.isfinite().all()) for x in (output, state.kv, state.k, state.log_scale[0]))
    assert bool((output[1] == 0).all())
    assert bool((state.log_scale[1] == -torch.inf).all())
    for gradient in torch.autograd.grad(output.sum(), list(tracked.values())):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_closed_gates_are_minus_infinity(form):
    """log_input -inf writes nothing, log_decay -inf forgets everything: like a mask, and like a new sequence."""
    inputs = make(20, B=1, state=False)
    inputs["log_decay"][:, :, 8] = -torch.inf
    inputs["log_input"][:, :, 15] = -torch.inf
    inputs["log_input"][:, :, :2] = -torch.inf
    whole = all_results(inputs, impl=form)
    assert all(bool(x.isfinite().all()) for x in whole)
    late = true_results({n: x[:, :, 8:] for n, x in inputs.items()}, impl=form)
    assert_same([whole[0][:, :, 8:], *whole[1:3]], late, 1e-12)
    finite = {
        **inputs,
        "log_decay": inputs["log_decay"].clamp(min=-1000),
        "log_input": inputs["log_input"].clamp(-2000),
    }
    assert_same(whole, all_results(finite, impl="reference"))


def test_forms_agree_for_strong_gates():
    """Non-negative features keep the denominator away from 0, where any form loses digits."""
    inputs = make(130)
    inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()
    inputs["log_input"] = inputs["log_input"] * 40
    inputs["initial_state"] = inputs["initial_state"]._replace(k=inputs["initial_state"].k.abs())
    expected = all_results(inputs, impl="reference")
    for form in FORMS:
        found = all_results(inputs, impl=form)
        assert_same([found[0], *found[3:8]], [expected[0], *expected[3:8]])


STATE = make(4)["initial_state"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(2, 2, 4, 3, dtype=F64)}, ValueError, "k has head dimension 3, but q has 5"),
        ({"log_input": torch.zeros(2, 4, 4)}, ValueError, r"log_input must have shape \(2, 2, 4\), got \(2, 4, 4\)"),
        ({"log_input": torch.zeros(2, 2, 4, dtype=torch.int64)}, TypeError, "log_input must be float32"),
        ({"log_input": torch.full((2, 2, 4), torch.nan)}, ValueError, "log_input must be below .inf and not NaN"),
        ({"log_decay": torch.ones(2, 2, 4)}, ValueError, "log_decay must be <= 0 .* got a maximum of 1"),
        ({"log_decay": None}, TypeError, r"log_decay must be a tensor \(B, H_kv, T\), got NoneType"),
        ({"scale": -1.0}, ValueError, "scale must be a finite number > 0, got -1.0"),
        ({"scale": "auto"}, ValueError, "scale must be a finite number"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "the batch size must be 1, got 2"),
        ({"initial_state": LinearState(*STATE[:2])}, TypeError, "must be ExponentialState.* got LinearState"),
        ({"initial_state": STATE._replace(log_scale=STATE.k)}, ValueError, "initial_state.log_scale must be"),
        ({"log_input": torch.zeros(2, 2, 4, device="meta")}, ValueError, "log_input is on meta, but q is on cpu"),
    ],
)
def test_wrong_calls_say_what_is_allowed(change, error, message):
    with pytest.raises(error, match=message):
        call({**make(4), **change})


def test_a_step_takes_one_token():
    q, k, v, i, f = (x[:, :, 0] for x in leaves(make(1, state=False)))
    with pytest.raises(ValueError, match=r"q_t must be \(B, H, K\), got shape \(2, 4, 1, 5\)"):
        exponential_attention_step(q.unsqueeze(2), k, v, None, log_input=i, log_decay=f)
    with pytest.raises(ValueError, match=r"log_input must be \(B, H_kv, T\)"):
        exponential_attention_step(q, k, v, None, log_input=i.unsqueeze(2), log_decay=f)
