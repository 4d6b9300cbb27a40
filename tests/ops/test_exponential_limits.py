"""Exponential attention where it is hard: extreme gates, low precision, compilation, wrong calls."""

import pytest
import torch

from linattn import exponential_attention, exponential_attention_step
from linattn.ops.shared.types import LinearState
from ops.exponential_cases import F64, FORMS, assert_same, call, cast, leaves, make, results, some_mask


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
    whole = results(inputs, impl=form)
    assert all(bool(x.isfinite().all()) for x in whole)
    late = call({n: x[:, :, 8:] for n, x in inputs.items()}, impl=form)
    assert_same([whole[0][:, :, 8:], *whole[1:4]], [late.output, *late.state], 1e-12)
    finite = {
        **inputs,
        "log_decay": inputs["log_decay"].clamp(min=-1000),
        "log_input": inputs["log_input"].clamp(-2000),
    }
    assert_same(whole, results(finite, impl="reference"))


def test_forms_agree_for_strong_gates():
    """Non-negative features keep the denominator away from 0, where any form loses digits."""
    inputs = make(130)
    inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()
    inputs["log_input"] = inputs["log_input"] * 40
    inputs["initial_state"] = inputs["initial_state"]._replace(k=inputs["initial_state"].k.abs())
    output = [results(inputs, impl=form) for form in ("reference", *FORMS)]
    for found in output[1:]:
        assert_same([found[0], *found[4:9]], [output[0][0], *output[0][4:9]])


@pytest.mark.parametrize("form", FORMS)
def test_single_precision_against_double(form):
    inputs = make(300, dtype=torch.float32)
    exact = results(cast(inputs, F64), impl="reference")
    assert_same([x.double() for x in results(inputs, impl=form)], exact, 3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    inputs = make(100, dtype=dtype, state=False)
    exact = call(cast(inputs, F64)).output
    output, state = call(inputs)
    assert output.dtype == dtype
    assert state.kv.dtype == state.k.dtype == state.log_scale.dtype == torch.float32
    # Inputs are exact in both: what differs is fp32 sums and one rounding of the output.
    error = (output.double() - exact).abs()
    assert bool((error <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5 * exact.abs().max()).all())


def test_autocast_sets_the_output_dtype_only():
    inputs = make(30, dtype=torch.float32)
    plain = call(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = call(inputs)
    assert mixed.output.dtype == torch.bfloat16
    assert torch.equal(mixed.output, plain.output.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(mixed.state, plain.state, strict=True))


@pytest.mark.parametrize("packed", [True, False])
def test_compiles_into_one_graph(packed):
    inputs = make(70, B=1 if packed else 2, state=False)
    options = {"cu_seqlens": torch.tensor([0, 0, 20, 70])} if packed else {"key_mask": some_mask(70)}
    tracked = {n: x.requires_grad_() for n, x in inputs.items()}

    def run():
        output = exponential_attention(
            tracked["q"], tracked["k"], tracked["v"], log_input=tracked["log_input"], log_decay=tracked["log_decay"],
            **options,
        )  # fmt: skip
        return [output, *torch.autograd.grad(output.sin().sum(), list(tracked.values()))]

    eager = run()
    compiled = torch.compile(exponential_attention, fullgraph=True, backend="aot_eager")
    output = compiled(
        tracked["q"], tracked["k"], tracked["v"], log_input=tracked["log_input"], log_decay=tracked["log_decay"],
        **options,
    )  # fmt: skip
    assert_same([output, *torch.autograd.grad(output.sin().sum(), list(tracked.values()))], eager)


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_no_tokens(form):
    inputs = make(0)
    output, state = call(inputs, impl=form)
    assert output.shape == (2, 4, 0, 6)
    assert_same(state, inputs["initial_state"])


STATE = make(4)["initial_state"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, r"q must be a tensor \(B, H, T, K\), got list"),
        ({"q": torch.zeros(2, 4, 4)}, ValueError, r"q must be \(B, H, T, K\), got shape \(2, 4, 4\)"),
        ({"k": torch.zeros(2, 2, 4, 5)}, TypeError, "k is torch.float32, but q is torch.float64"),
        ({"k": torch.zeros(2, 2, 4, 3, dtype=F64)}, ValueError, "k has head dimension 3, but q has 5"),
        ({"v": torch.zeros(2, 2, 3, 6, dtype=F64)}, ValueError, "v has length 3, but k has 4"),
        ({"k": torch.zeros(2, 3, 4, 5, dtype=F64)}, ValueError, "must be a multiple of the heads of k"),
        ({"log_input": torch.zeros(2, 4, 4)}, ValueError, r"log_input must have shape \(2, 2, 4\), got \(2, 4, 4\)"),
        ({"log_input": torch.zeros(2, 2, 4, dtype=torch.int64)}, TypeError, "log_input must be float32"),
        ({"log_input": torch.full((2, 2, 4), torch.nan)}, ValueError, "log_input must be below .inf and not NaN"),
        ({"log_decay": torch.ones(2, 2, 4)}, ValueError, "log_decay must be <= 0 .* got a maximum of 1"),
        ({"log_decay": None}, TypeError, r"log_decay must be a tensor \(B, H_kv, T\), got NoneType"),
        ({"scale": -1.0}, ValueError, r"scale must be a positive number or None \(K\*\*-0.5\), got -1.0"),
        ({"scale": "auto"}, ValueError, "scale must be a positive number"),
        ({"key_mask": torch.ones(2, 4)}, TypeError, "key_mask must be bool"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "the batch size must be 1, got 2"),
        ({"initial_state": LinearState(*STATE[:2])}, TypeError, "must be ExponentialState.* got LinearState"),
        ({"initial_state": STATE._replace(log_scale=STATE.k)}, ValueError, "initial_state.log_scale must be"),
        ({"initial_state": STATE._replace(kv=STATE.kv[:1])}, ValueError, "initial_state.kv must have shape"),
        ({"log_input": torch.zeros(2, 2, 4, device="meta")}, ValueError, "log_input is on meta, but q is on cpu"),
        ({"impl": "triton3"}, ValueError, "impl must be one of 'auto', 'reference', 'recurrent', 'chunked'"),
    ],
)
def test_wrong_calls_say_what_is_allowed(change, error, message):
    with pytest.raises(error, match=message):
        call({**make(4), **change})


def test_a_step_takes_one_token():
    q, k, v, i, f = (x[:, :, 0] for x in leaves(make(1, state=False)))
    with pytest.raises(ValueError, match=r"q_t must be \(B, H, K\), got shape \(2, 4, 1, 5\)"):
        exponential_attention_step(q.unsqueeze(2), k, v, None, log_input=i, log_decay=f)
    with pytest.raises(ValueError, match=r"log_input must be \(B, H_kv\)"):
        exponential_attention_step(q, k, v, None, log_input=i.unsqueeze(2), log_decay=f)
