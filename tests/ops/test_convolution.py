"""The short convolution: its forms agree, and without gaps all are torch's own depthwise convolution."""

import pytest
import torch
import torch.nn.functional as F

from linattn import short_convolution, short_convolution_step, short_convolution_with_state
from linattn.ops.convolution.call import ConvolutionState

FORMS = ["recurrent", "chunked"]
LENGTHS = [1, 2, 63, 64, 65, 197, 300]
F64 = torch.float64


def make(T, *, B=2, C=3, W=4, n=None, dtype=F64, seed=0):
    g = torch.Generator().manual_seed(seed)
    n = B if n is None else n
    shapes = {"x": (B, T, C), "weight": (C, W), "bias": (C,), "state": (n, W - 1, C)}
    return {name: torch.randn(*shape, generator=g, dtype=F64).to(dtype) for name, shape in shapes.items()}


def call(inputs, **options):
    state = ConvolutionState(inputs["state"]) if "state" in inputs else None
    return short_convolution_with_state(
        inputs["x"], inputs["weight"], inputs.get("bias"), initial_state=state, **options
    )


def results(inputs, **options):
    """Output, state and all gradients."""
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    output, (state,) = call(inputs, **options)
    g = torch.Generator().manual_seed(99)
    weights = [torch.randn(x.shape, generator=g, dtype=F64).to(x) for x in (output, state)]
    gradients = torch.autograd.grad((output * weights[0]).sum() + (state * weights[1]).sum(), list(inputs.values()))
    return [output.detach(), state.detach(), *gradients]


def assert_same(found, expected, tolerance=1e-10):
    for a, b in zip(found, expected, strict=True):
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


def some_mask(T, B=2):
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[0, : min(T, 3)] = False
    mask[-1, T // 2 :] = False
    return mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("masked", [True, False])
def test_forms_agree(form, T, masked):
    inputs = make(T)
    options = {"key_mask": some_mask(T) if masked else None, "activation": "silu", "residual": True}
    assert_same(results(inputs, impl=form, **options), results(inputs, impl="reference", **options))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("W", [1, 2, 3, 4, 8, 11])
@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize("masked", [True, False])
def test_forms_agree_for_every_width(form, W, T, masked):
    inputs, mask = make(T, W=W), some_mask(T) if masked else None
    assert_same(results(inputs, impl=form, key_mask=mask), results(inputs, impl="reference", key_mask=mask))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("W", [1, 4, 8])
def test_forms_agree_on_packed_sequences(form, masked, W):
    cu = torch.tensor([0, 0, 3, 68, 68, 69, 90, 90], dtype=torch.int32)
    inputs = make(90, B=1, n=7, W=W)
    options = {"cu_seqlens": cu, "key_mask": some_mask(90)[:1] if masked else None}
    assert_same(results(inputs, impl=form, **options), results(inputs, impl="reference", **options))


@pytest.mark.parametrize("form", ["reference", *FORMS])
@pytest.mark.parametrize("T", [1, 3, 50])
def test_it_is_the_depthwise_convolution_of_torch(form, T):
    inputs = {n: x for n, x in make(T).items() if n != "state"}
    tensors = {n: x.requires_grad_() for n, x in inputs.items()}
    x, weight, bias = tensors.values()
    padded = F.pad(x.transpose(1, 2), (3, 0))
    expected = F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=3)).transpose(1, 2) + x
    found = short_convolution(x, weight, bias, residual=True, activation="silu", impl=form)
    direction = torch.randn(expected.shape, dtype=F64)
    gradients = [torch.autograd.grad((y * direction).sum(), list(tensors.values())) for y in (found, expected)]
    assert_same([found, *gradients[0]], [expected, *gradients[1]], 1e-12)


def test_canon_is_the_residual_alone():
    """h'_t = h_t + sum_i w_i h_{t-i}, no bias, no activation."""
    x, weight = make(6)["x"], make(6)["weight"]
    found = short_convolution(x, weight, residual=True)
    for t in range(6):
        expected = x[:, t] + sum(weight[:, 3 - i] * x[:, t - i] for i in range(4) if t >= i)
        torch.testing.assert_close(found[:, t], expected)


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_masked_tokens_are_as_if_they_were_not_there(form):
    inputs, mask = make(40), some_mask(40)
    inputs["x"][~mask] = torch.nan
    options = {"activation": "silu", "residual": True, "impl": form}
    output, state = call(inputs, key_mask=mask, **options)
    assert bool((output[~mask] == 0).all())
    for b in range(2):
        alone = {**inputs, "x": inputs["x"][b][mask[b]].unsqueeze(0), "state": inputs["state"][b : b + 1]}
        expected = call(alone, **options)
        torch.testing.assert_close(output[b][mask[b]], expected.output[0], rtol=0, atol=1e-13)
        assert torch.equal(state.inputs[b], expected.state.inputs[0])
    clean = {n: x.requires_grad_() for n, x in inputs.items()}
    for gradient in torch.autograd.grad(call(clean, key_mask=mask, **options).output.sum(), list(clean.values())):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_windows_do_not_cross_boundaries(form):
    lengths = [5, 0, 2, 30]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    inputs = make(37, B=1, n=4)
    packed = call(inputs, impl=form, cu_seqlens=cu)
    for n, (s, e) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        alone = call({**inputs, "x": inputs["x"][:, s:e], "state": inputs["state"][n : n + 1]}, impl=form)
        torch.testing.assert_close(packed.output[:, s:e], alone.output, rtol=0, atol=1e-13)
        assert torch.equal(packed.state.inputs[n], alone.state.inputs[0])


@pytest.mark.parametrize("form", ["reference", *FORMS])
@pytest.mark.parametrize("pieces", [[0, 12], [1, 1, 10], [2, 0, 1, 9], [7, 5], [12, 0]])
@pytest.mark.parametrize("masked", [True, False])
def test_a_cut_with_the_state_handed_over_changes_nothing(form, pieces, masked):
    inputs, mask = make(12, W=5), some_mask(12) if masked else None
    whole = call(inputs, impl=form, key_mask=mask)
    state, outputs, begin = ConvolutionState(inputs["state"]), [], 0
    for length in pieces:
        part = {**inputs, "x": inputs["x"][:, begin : begin + length], "state": state.inputs}
        out = call(part, impl=form, key_mask=None if mask is None else mask[:, begin : begin + length])
        outputs.append(out.output)
        state, begin = out.state, begin + length
    torch.testing.assert_close(torch.cat(outputs, 1), whole.output, rtol=0, atol=1e-13)
    assert torch.equal(state.inputs, whole.state.inputs)


@pytest.mark.parametrize("W", [1, 4])
def test_step_by_step(W):
    inputs = make(10, W=W)
    del inputs["state"]
    options = {"residual": True, "activation": "silu"}
    whole = call(inputs, **options)
    state, outputs = None, []
    for t in range(10):
        out = short_convolution_step(inputs["x"][:, t], inputs["weight"], inputs["bias"], state, **options)
        outputs.append(out.output)
        state = out.state
    torch.testing.assert_close(torch.stack(outputs, 1), whole.output, rtol=0, atol=1e-13)
    assert torch.equal(state.inputs, whole.state.inputs)


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_the_past_never_moves_when_the_future_changes(form):
    inputs, other = make(20), make(20, seed=1)
    changed = {**inputs, "x": torch.cat([inputs["x"][:, :13], other["x"][:, 13:]], 1)}
    before, after = call(inputs, impl=form).output, call(changed, impl=form).output
    assert torch.equal(before[:, :13], after[:, :13])
    assert not torch.allclose(before[:, 13:], after[:, 13:])


@pytest.mark.parametrize("form", ["reference", *FORMS])
@pytest.mark.parametrize("packed", [True, False])
def test_gradcheck(form, packed):
    inputs = make(5, B=1, C=2, W=3, n=3 if packed else 1)
    options = {"cu_seqlens": torch.tensor([0, 1, 1, 5]) if packed else None, "impl": form, "residual": True}
    mask = torch.tensor([[True, False, True, True, True]])

    def run(*tensors):
        output, (state,) = call(dict(zip(inputs, tensors, strict=True)), key_mask=mask, activation="silu", **options)
        return output, state

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs.values()])


@pytest.mark.parametrize("form", FORMS)
def test_single_precision_against_double(form):
    inputs = make(300, dtype=torch.float32)
    exact = results({n: x.double() for n, x in inputs.items()}, impl="reference", activation="silu")
    found = results(inputs, impl=form, activation="silu")
    assert_same([x.double() for x in found], exact, 2e-6)  # a few roundings of 6e-8 over 600 summed tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    inputs = make(50, dtype=dtype)
    exact = call({n: x.double() for n, x in inputs.items()}, residual=True).output
    output, (state,) = call(inputs, residual=True)
    assert output.dtype == state.dtype == dtype
    assert torch.equal(state, inputs["x"][:, -3:])
    error = (output.double() - exact).abs()
    assert bool((error <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6).all())


def test_autocast_sets_the_output_dtype_only():
    inputs = make(20, dtype=torch.float32)
    plain = call(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = call(inputs)
    assert mixed.output.dtype == torch.bfloat16
    assert torch.equal(mixed.output, plain.output.bfloat16())
    assert torch.equal(mixed.state.inputs, plain.state.inputs)


@pytest.mark.parametrize("how", ["plain", "masked", "packed"])
def test_compiles_into_one_graph(how):
    inputs = {n: x.requires_grad_() for n, x in make(30, B=1 if how == "packed" else 2).items() if n != "state"}
    options = {
        "plain": {},
        "masked": {"key_mask": some_mask(30)},
        "packed": {"cu_seqlens": torch.tensor([0, 0, 9, 30])},
    }[how]
    compiled = torch.compile(short_convolution, fullgraph=True, backend="aot_eager")
    both = [f(*inputs.values(), activation="silu", **options) for f in (compiled, short_convolution)]
    gradients = [torch.autograd.grad(y.sin().sum(), list(inputs.values())) for y in both]
    assert_same([both[0], *gradients[0]], [both[1], *gradients[1]])


def test_a_compiled_graph_serves_every_mask():
    inputs = make(30)
    compiled = torch.compile(short_convolution, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(seed)) < 0.5
        expected = short_convolution(inputs["x"], inputs["weight"], key_mask=mask, impl="reference")
        with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
            found = compiled(inputs["x"], inputs["weight"], key_mask=mask)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, r"x must be a tensor \(B, T, C\), got list"),
        ({"x": torch.zeros(4, 3)}, ValueError, r"x must be \(B, T, C\), got shape \(4, 3\)"),
        ({"x": torch.zeros(2, 4, 3, dtype=torch.int64)}, TypeError, "x must be float32, float64, bfloat16"),
        ({"weight": torch.zeros(3, 1, 4, dtype=F64)}, ValueError, r"weight must be \(C, W\), got shape \(3, 1, 4\)"),
        ({"weight": torch.zeros(5, 4, dtype=F64)}, ValueError, "weight has number of channels 5, but x has 3"),
        ({"weight": torch.zeros(3, 0, dtype=F64)}, ValueError, "weight must have a width W >= 1"),
        ({"weight": torch.zeros(3, 4)}, TypeError, "weight is torch.float32, but x is torch.float64"),
        ({"bias": torch.zeros(4, dtype=F64)}, ValueError, r"bias must have shape \(3,\), got \(4,\)"),
        ({"activation": "relu"}, ValueError, "activation must be one of 'silu', None, got 'relu'"),
        ({"residual": 1}, TypeError, "residual must be True or False, got 1"),
        ({"key_mask": torch.ones(2, 4)}, TypeError, "key_mask must be bool"),
        ({"key_mask": torch.ones(2, 5, dtype=torch.bool)}, ValueError, r"key_mask must have shape \(2, 4\)"),
        ({"key_mask": torch.ones(2, 4, dtype=torch.bool, device="meta")}, ValueError, "on meta, but x is on cpu"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "the batch size must be 1, got 2"),
        ({"initial_state": torch.zeros(2, 3, 3)}, TypeError, r"must be ConvolutionState\(inputs\) .* got Tensor"),
        ({"initial_state": ConvolutionState(torch.zeros(2, 4, 3))}, ValueError, r"must have shape \(2, 3, 3\)"),
        ({"impl": "triton3"}, ValueError, "impl must be one of 'auto', 'reference', 'recurrent', 'chunked'"),
    ],
)
def test_wrong_calls_say_what_is_allowed(change, error, message):
    arguments = {**make(4), **change}
    del arguments["state"]
    with pytest.raises(error, match=message):
        short_convolution_with_state(**arguments)


def test_offsets_are_checked():
    inputs = make(4, B=1)
    with pytest.raises(ValueError, match="cu_seqlens must start at 0 and end at T = 4"):
        short_convolution(inputs["x"], inputs["weight"], cu_seqlens=torch.tensor([0, 3]))


def test_a_step_takes_one_token():
    inputs = make(1)
    with pytest.raises(ValueError, match=r"x_t must be \(B, C\), got shape \(2, 1, 3\)"):
        short_convolution_step(inputs["x"], inputs["weight"], None, None)
