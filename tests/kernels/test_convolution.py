"""The short convolution's kernels: output, last inputs and all gradients against the fp64 definition."""

import pytest
import torch

from kernels.device import DEVICE
from linattn.kernels.convolution.apply import (
    WIDEST,
    convolve,
    convolve_fused,
    convolve_step,
    convolve_step_,
    reason_against_convolution,
)
from linattn.kernels.convolution.library import (
    Walk,
    convolution,
    convolution_backward,
    convolution_step,
    convolution_step_in_place,
    launch_backward,
    launch_forward,
)
from linattn.ops.convolution.api import short_convolution, short_convolution_step, short_convolution_with_state
from linattn.ops.convolution.call import ConvolutionState
from linattn.ops.convolution.reference import convolve as reference_form
from linattn.testing.poison import poisoned_allocations

F64 = torch.float64


def make(T, *, B=2, C=5, W=4, n=None, bias=True, state=True, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (B, T, C), "weight": (C, W)}
    shapes |= {"bias": (C,)} if bias else {}
    shapes |= {"initial": (B if n is None else n, W - 1, C)} if state else {}
    return {name: torch.randn(*shape, generator=g, dtype=F64).to(DEVICE, dtype) for name, shape in shapes.items()}


def some_mask(T, B=2):
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[0, : min(T, 3)] = False
    mask[-1, T // 2 :] = False
    return mask.to(DEVICE)


def by_kernel(t, **options):
    options = {"out_dtype": t["x"].dtype} | options
    return convolve_fused(t["x"], t["weight"], t.get("bias"), initial=t.get("initial"), **options)


def by_reference(t, **options):
    state = ConvolutionState(t["initial"]) if "initial" in t else None
    output, (last,) = short_convolution_with_state(
        t["x"], t["weight"], t.get("bias"), initial_state=state, impl="reference", **options
    )
    return output, last


def results(run, tensors, **options):
    """Output, last inputs and the gradients of everything."""
    tensors = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    outputs = run(tensors, **options)
    g = torch.Generator().manual_seed(9)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=F64).to(x)).sum() for x in outputs)
    gradients = torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True)
    return [x.detach() for x in outputs] + list(gradients)


def assert_within_budget(tensors, **options):
    exact = results(by_reference, {name: x.double() for name, x in tensors.items()}, **options)
    plain = results(by_reference, tensors, **options)
    found = results(by_kernel, tensors, **options)
    names = ["output", "last", *(f"d_{name}" for name in tensors)]
    for name, a, b, c in zip(names, found, plain, exact, strict=True):
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        if a.numel():
            allowed = 2 * ((b.double() - c).abs().max() + torch.finfo(b.dtype).eps * c.abs().max())
            assert (a.double() - c).abs().max() <= allowed, name


# Of each two options every pair of values: the kernels' branches nest no deeper.
@pytest.mark.parametrize(
    ("masked", "activation", "residual"),
    [(False, None, False), (True, None, True), (False, "silu", True), (True, "silu", False)],
)
def test_values_and_gradients(masked, activation, residual):
    mask = some_mask(13) if masked else None
    assert_within_budget(make(13), key_mask=mask, activation=activation, residual=residual)


@pytest.mark.parametrize("T", [1, 2, 35])
@pytest.mark.parametrize("masked", [False, True])
def test_lengths(T, masked):
    assert_within_budget(make(T, B=1), key_mask=some_mask(T, 1) if masked else None, activation="silu")


@pytest.mark.parametrize(("W", "masked"), [(1, False), (2, True), (3, False), (8, True)])
def test_widths(W, masked):
    assert_within_budget(make(9, B=1, W=W), key_mask=some_mask(9, 1) if masked else None, activation="silu")


@pytest.mark.parametrize("C", [1, 33, 300])
def test_channels(C):
    assert_within_budget(make(6, B=1, C=C), residual=True)


@pytest.mark.parametrize(("bias", "state", "masked"), [(False, False, False), (False, True, True), (True, False, True)])
def test_without_bias_or_state(bias, state, masked):
    mask = some_mask(6) if masked else None
    assert_within_budget(make(6, bias=bias, state=state), key_mask=mask, activation="silu")


@pytest.mark.parametrize(("dtype", "masked"), [(torch.bfloat16, True), (torch.float16, False)])
def test_low_precision(dtype, masked):
    mask = some_mask(9) if masked else None
    assert_within_budget(make(9, C=16, dtype=dtype), key_mask=mask, activation="silu", residual=True)


@pytest.mark.parametrize(
    ("masked", "state", "W"), [(False, False, 4), (True, True, 4), (False, True, 1), (True, False, 1)]
)
def test_packed_sequences(masked, state, W):
    cu = torch.tensor([0, 0, 3, 15, 15, 16, 22, 22], dtype=torch.int32, device=DEVICE)
    tensors = make(22, B=1, n=7, W=W, state=state)
    mask = some_mask(22)[:1] if masked else None
    assert_within_budget(tensors, cu_seqlens=cu, key_mask=mask, activation="silu", residual=True)


@pytest.mark.parametrize(
    ("T", "segment", "group", "masked"), [(11, 5, 4, False), (11, 5, 4, True), (11, 4, 8, False), (5, 3, 1, True)]
)
def test_every_cut_into_segments(T, segment, group, masked):
    """The launch's own choice needs long sequences; a group may not go beyond a segment forward."""
    from linattn.kernels.convolution.places import lay_out

    t = make(T, B=1)
    places = lay_out(t["x"], 3, some_mask(T, 1), None).table if masked else None
    dy = torch.randn_like(t["x"])
    args = t["x"], t["weight"], t["bias"], t["initial"], places, True, True
    expected = convolution(*args, masked, torch.float32)
    y = torch.zeros_like(expected)
    launch_forward(*args, y, Walk(32, group, -(-segment // group) * group, 1))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)

    wanted = convolution_backward(dy, *args, masked)
    dx, d_initial = torch.zeros_like(y), torch.full_like(t["initial"], torch.nan)
    partial = launch_backward(dy, *args, dx, d_initial, Walk(32, group, segment, 1))
    assert partial.shape[0] > 2
    sums = partial.sum(0)
    for a, b in zip((dx, sums[:4].t(), sums[4], d_initial), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_masked_tokens_reach_nothing():
    tensors, mask = make(12), some_mask(12)
    clean = results(by_kernel, tensors, key_mask=mask, residual=True, activation="silu")
    tensors["x"] = tensors["x"].masked_fill(~mask.unsqueeze(-1), torch.nan)
    for a, b in zip(results(by_kernel, tensors, key_mask=mask, residual=True, activation="silu"), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_an_overflow_stays_in_its_sequence():
    """What walks over a boundary belongs to nobody, whatever it is."""
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    tensors = make(12, B=1, n=2)
    clean = results(by_kernel, tensors, cu_seqlens=cu, activation="silu")
    tensors["x"] = tensors["x"].clone()
    tensors["x"][:, 4] = torch.inf
    found = results(by_kernel, tensors, cu_seqlens=cu, activation="silu")
    assert torch.equal(found[0][:, 5:], clean[0][:, 5:])
    assert torch.equal(found[2][:, 5:], clean[2][:, 5:])


def test_strides_are_followed():
    tensors = make(10, C=8)
    options = {"key_mask": some_mask(10), "activation": "silu"}
    expected = results(by_kernel, tensors, **options)
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in tensors.items()}
    for a, b in zip(results(by_kernel, strided, **options), expected, strict=True):
        assert torch.equal(a, b)
    part = torch.cat([tensors["x"]] * 3, dim=-1)[..., 8:16]
    assert torch.equal(by_kernel(tensors | {"x": part}, **options)[0], expected[0])


def test_nothing_to_do():
    tensors = make(0)
    assert_within_budget(tensors)
    assert by_kernel(make(4, B=0))[0].shape == (0, 4, 5)


def test_it_is_a_form():
    t, mask = make(15), some_mask(15)
    found = convolve(t["x"], t["weight"], mask, None, t["initial"])
    for a, b in zip(found, reference_form(t["x"], t["weight"], mask, None, t["initial"]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("W", "state"), [(1, True), (2, False), (4, True), (4, False)])
def test_steps_are_the_sequence(W, state):
    t = make(6, W=W, C=7, state=state)
    options = {"activation": "silu", "residual": True, "out_dtype": torch.float32}
    expected, last = by_kernel(t, **options)
    inputs = t.get("initial")
    for i in range(6):
        output, inputs = convolve_step(t["x"][:, i], t["weight"], t["bias"], inputs, **options)
        torch.testing.assert_close(output, expected[:, i], rtol=1e-6, atol=1e-6)
    assert torch.equal(inputs, last)
    inputs = torch.zeros_like(last) if not state else t["initial"].clone()
    for i in range(6):
        output = convolve_step_(t["x"][:, i], t["weight"], t["bias"], inputs, **options)
        torch.testing.assert_close(output, expected[:, i], rtol=1e-6, atol=1e-6)
    assert torch.equal(inputs, last)


def test_a_step_has_gradients_but_not_in_place():
    t = make(1)
    t = {name: x.requires_grad_() for name, x in t.items()}
    y, last = convolve_step(t["x"][:, 0], t["weight"], t["bias"], t["initial"], out_dtype=torch.float32)
    found = torch.autograd.grad(y.sum() + last.square().sum(), list(t.values()))
    y, last = by_reference(t)
    expected = torch.autograd.grad(y.sum() + last.square().sum(), list(t.values()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(RuntimeError, match="no gradient"):
        convolve_step_(t["x"][:, 0], t["weight"], t["bias"], t["initial"], out_dtype=torch.float32)


def by_name(t, **options):
    """The public call."""
    state = ConvolutionState(t["initial"]) if "initial" in t else None
    output, (last,) = short_convolution_with_state(
        t["x"], t["weight"], t.get("bias"), initial_state=state, impl="triton", **options
    )
    return output, last


@pytest.mark.parametrize("options", [{}, {"residual": True}, {"activation": "silu", "masked": True}, {"packed": True}])
def test_the_public_call_is_the_kernel(options):
    options = dict(options)
    packed = options.pop("packed", False)
    tensors = make(5, B=1, n=3) if packed else make(5)
    options["key_mask"] = some_mask(5) if options.pop("masked", False) else None
    options["cu_seqlens"] = torch.tensor([0, 2, 2, 5], device=DEVICE) if packed else None
    for a, b in zip(results(by_name, tensors, **options), results(by_kernel, tensors, **options), strict=True):
        assert torch.equal(a, b)


def test_the_public_call_of_one_token_is_the_step():
    t = make(1)
    output, last = by_name(t, residual=True)
    expected = convolve_step(t["x"][:, 0], t["weight"], t["bias"], t["initial"], residual=True, out_dtype=torch.float32)
    for a, b in zip((output[:, 0], last), expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(short_convolution(t["x"], t["weight"], t["bias"], impl="triton") + t["x"],
                       short_convolution(t["x"], t["weight"], t["bias"], impl="triton", residual=True))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_graph_replays_the_public_step():
    t = make(1, B=4, C=300, dtype=torch.bfloat16)
    x_t, held = t["x"][:, 0], ConvolutionState(t["initial"].clone())
    with torch.no_grad():
        short_convolution_step(x_t, t["weight"], t["bias"], held, activation="silu")  # compiles before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, state = short_convolution_step(x_t, t["weight"], t["bias"], held, activation="silu")
            held.inputs.copy_(state.inputs)
        expected = ConvolutionState(t["initial"])
        for _ in range(4):
            graph.replay()
            right, expected = short_convolution_step(x_t, t["weight"], t["bias"], expected, activation="silu")
    torch.cuda.synchronize()
    assert torch.equal(captured, right)
    assert torch.equal(held.inputs, expected.inputs)


def test_wide_windows_are_refused_in_words():
    t = make(3, W=WIDEST + 1)
    assert "9 tokens wide" in reason_against_convolution(t["x"], t["weight"])
    assert reason_against_convolution(t["x"], t["weight"][:, 1:], None) == ""


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_unwritten_is_read_and_runs_are_bit_equal(masked):
    tensors, options = make(8), {"key_mask": some_mask(8) if masked else None, "activation": "silu"}
    expected = results(by_kernel, tensors, **options)
    with poisoned_allocations():
        found = results(by_kernel, tensors, **options)
    for a, b, c in zip(found, expected, results(by_kernel, tensors, **options), strict=True):
        assert not a.isnan().any()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert torch.equal(b, c)


def test_operators_are_registered_well():
    t = {name: x.requires_grad_() for name, x in make(2, B=1).items()}
    args = t["x"], t["weight"], t["bias"], t["initial"], None
    torch.library.opcheck(convolution, (*args, True, True, False, torch.float32))
    torch.library.opcheck(convolution, (args[0], args[1], None, None, None, False, False, False, torch.bfloat16))
    t = make(5)
    step = t["x"][:, 0], t["weight"], t["bias"], t["initial"], True, True, torch.float32
    torch.library.opcheck(convolution_step, step)
    torch.library.opcheck(convolution_step_in_place, step)


def test_traced_whole():
    tensors, mask = make(5), some_mask(5)
    compiled = torch.compile(by_kernel, backend="aot_eager", fullgraph=True)
    found = results(compiled, tensors, key_mask=mask, activation="silu")
    for a, b in zip(found, results(by_kernel, tensors, key_mask=mask, activation="silu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("B", "T", "C", "masked", "dtype"),
    [
        (8, 4096, 256, False, torch.bfloat16),
        (8, 4096, 256, True, torch.bfloat16),
        (1, 30000, 384, False, torch.float32),
        (1, 30000, 384, True, torch.bfloat16),
        (3, 1000, 100, False, torch.bfloat16),
        (3, 1000, 100, True, torch.float32),
    ],
)
def test_long_sequences(B, T, C, masked, dtype):
    tensors = make(T, B=B, C=C, dtype=dtype)
    mask = some_mask(T, B) if masked else None
    assert_within_budget(tensors, key_mask=mask, activation="silu", residual=True)
