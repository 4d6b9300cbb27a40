"""Exponential attention and the short convolution: forms agree, states stand for the past, padding changes nothing."""

import pytest
import torch

from linattn import explain, exponential_attention, hybrid_attention, linear_attention, short_convolution
from ops import convolution_cases, exponential_cases
from ops.exponential_cases import cast, change, leaves

F64 = torch.float64
OPS = [pytest.param(exponential_cases, id="exponential"), pytest.param(convolution_cases, id="convolution")]
FORMS = ["recurrent", "chunked"]


def every(forms):
    def mark(test):
        return pytest.mark.parametrize("op", OPS)(pytest.mark.parametrize("form", forms)(test))

    return mark


def results(op, inputs, **options):
    """Output, state and the gradients of everything, for a loss that also reads the true state."""
    inputs = change(inputs, lambda x: x.detach().requires_grad_())
    found = op.true_results(inputs, **options)
    g = torch.Generator().manual_seed(99)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=F64).to(x)).sum() for x in found)
    return [x.detach() for x in (*found, *torch.autograd.grad(loss, leaves(inputs)))]


def assert_same(found, expected, tolerance=1e-10):
    """Relative to the largest entry: gradients scale with the number of tokens they sum over."""
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.isinf(), b.isinf())
        a, b = a.masked_fill(a.isinf(), 0), b.masked_fill(b.isinf(), 0)
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


def some_mask(T, B=2):
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[0, : min(T, 3)] = False
    mask[-1, T // 2 :] = False
    return mask


def per_token(op, inputs, f):
    return {n: x if n in op.SHARED else f(x) for n, x in inputs.items()}


def piece(op, inputs, start, end):
    return per_token(op, inputs, lambda x: x.narrow(op.AXIS, start, end - start))


def row(op, inputs, b):
    """One sequence of a batch, with its state."""
    alone = {n: x if n in ("weight", "bias", "initial_state") else x[b : b + 1] for n, x in inputs.items()}
    if "initial_state" in inputs:
        state = inputs["initial_state"]
        alone["initial_state"] = type(state)(*(x[b : b + 1] for x in state))
    return alone


@every(FORMS)
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 197, 300])
@pytest.mark.parametrize("masked", [True, False])
def test_forms_agree(op, form, T, masked):
    inputs, options = op.make(T, state=T != 65), {"key_mask": some_mask(T) if masked else None}
    assert_same(results(op, inputs, impl=form, **options), results(op, inputs, impl="reference", **options))


@every(FORMS)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("state", [True, False])
def test_forms_agree_on_packed_sequences(op, form, masked, state):
    cu = torch.tensor([0, 0, 3, 68, 68, 69, 132, 132], dtype=torch.int32)
    inputs, options = op.make(132, B=1, n=7, state=state), {"key_mask": some_mask(132, 1) if masked else None}
    expected = results(op, inputs, impl="reference", cu_seqlens=cu, **options)
    assert_same(results(op, inputs, impl=form, cu_seqlens=cu, **options), expected)


@every(["reference", *FORMS])
@pytest.mark.parametrize("lengths", [[0, 12], [1, 1, 10], [2, 0, 1, 9], [64, 36], [99, 1], [12, 0]])
@pytest.mark.parametrize("masked", [True, False])
def test_a_cut_with_the_state_handed_over_changes_nothing(op, form, lengths, masked):
    """In values and in gradients; pieces may be shorter than a window."""
    T = sum(lengths)
    inputs, mask = op.make(T), some_mask(T) if masked else None
    tensors = [x.requires_grad_() for x in leaves(inputs)]
    whole = op.call(inputs, impl=form, key_mask=mask)
    state, outputs, begin = inputs["initial_state"], [], 0
    for length in lengths:
        part = piece(op, inputs, begin, begin + length) | {"initial_state": state}
        out = op.call(part, impl=form, key_mask=None if mask is None else mask[:, begin : begin + length])
        outputs.append(out.output)
        state, begin = out.state, begin + length
    joined = torch.cat(outputs, op.AXIS)
    assert_same([joined, *state], [whole.output, *whole.state], 1e-12)
    gradients = [torch.autograd.grad(x.sin().sum(), tensors, allow_unused=True, materialize_grads=True)
                 for x in (joined, whole.output)]  # fmt: skip
    assert_same(*gradients)


@pytest.mark.parametrize("op", OPS)
def test_step_by_step(op):
    inputs = op.make(70, state=False)
    whole = op.call(inputs, impl="reference")
    state, outputs = None, []
    for t in range(70):
        token = per_token(op, inputs, lambda x, t=t: x.select(op.AXIS, t))
        output, state = op.call_step(token, state)
        outputs.append(output)
    assert_same([torch.stack(outputs, op.AXIS), *state], [whole.output, *whole.state], 1e-12)


@every(["reference", *FORMS])
def test_padding_packing_and_one_by_one_agree(op, form):
    """Padding may hold anything, left, right and in between, and gives no gradient."""
    lengths, T = [5, 70, 0, 33], 70
    inputs = op.make(T, B=4)
    joined = per_token(
        op, inputs, lambda x: torch.cat([x[b : b + 1].narrow(op.AXIS, 0, n) for b, n in enumerate(lengths)], op.AXIS)
    )
    packed = op.call(joined, impl=form, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    alone = [op.call(piece(op, row(op, inputs, b), 0, n), impl=form) for b, n in enumerate(lengths)]
    begin = 0
    for b, (length, (output, state)) in enumerate(zip(lengths, alone, strict=True)):
        own = packed.output.narrow(op.AXIS, begin, length), *(x[b : b + 1] for x in packed.state)
        assert_same(own, [output, *state], 1e-12)
        begin += length
    right = torch.arange(T) < torch.tensor(lengths)[:, None]
    gaps = torch.rand(4, T, generator=torch.Generator().manual_seed(0)).argsort(-1) < torch.tensor(lengths)[:, None]
    for mask in (right, right.flip(1), gaps):

        def spread(x, mask=mask):
            padded = torch.full_like(x, torch.nan).movedim(op.AXIS, 1)
            padded[mask] = x.movedim(op.AXIS, 1)[right]
            return padded.movedim(1, op.AXIS)

        tracked = change(per_token(op, inputs, spread), lambda x: x.clone().requires_grad_())
        if "q" in tracked:  # the output of a masked query is not read
            tracked["q"] = tracked["q"].detach().nan_to_num().requires_grad_()
        padded = op.call(tracked, impl=form, key_mask=mask)
        for b, (output, state) in enumerate(alone):
            real = padded.output[b : b + 1].movedim(op.AXIS, 1)[:, mask[b]].movedim(1, op.AXIS)
            assert_same([real, *(x[b : b + 1] for x in padded.state)], [output, *state], 1e-12)
        real = padded.output.movedim(op.AXIS, 1)[mask]
        assert all(x.isfinite().all() for x in torch.autograd.grad(real.sum(), leaves(tracked)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(op, dtype):
    inputs = op.make(100, dtype=dtype, state=False)
    exact = op.call(cast(inputs, F64)).output
    output = op.call(inputs).output
    assert output.dtype == dtype
    # Inputs are exact in both: what differs is fp32 sums and one rounding of the output.
    error = (output.double() - exact).abs()
    assert bool((error <= torch.finfo(dtype).eps / 2 * exact.abs() + op.LOW * exact.abs().max()).all())


@pytest.mark.parametrize("op", OPS)
def test_autocast_sets_the_output_dtype_only(op):
    inputs = op.make(30, dtype=torch.float32)
    plain = op.call(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = op.call(inputs)
    assert mixed.output.dtype == torch.bfloat16
    assert torch.equal(mixed.output, plain.output.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(mixed.state, plain.state, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_one_compiled_graph_serves_every_mask_and_every_packing(op):
    torch.compiler.reset()
    compiled = torch.compile(op.plain, fullgraph=True, backend="aot_eager")
    cu = torch.tensor([0, 0, 9, 30])
    for n, (B, options) in enumerate(
        ((2, {"key_mask": some_mask(30)}), (2, {"key_mask": some_mask(30).flip(1)}), (1, {"cu_seqlens": cu}),
         (1, {"cu_seqlens": torch.tensor([0, 4, 29, 30])}))
    ):  # fmt: skip
        inputs = change(op.make(30, B=B, state=False), lambda x: x.requires_grad_())
        with torch.compiler.set_stance("fail_on_recompile" if n % 2 else "default"):
            both = [f(**inputs, **options) for f in (compiled, op.plain)]
        gradients = [torch.autograd.grad(y.sin().sum(), leaves(inputs)) for y in both]
        assert_same([both[0], *gradients[0]], [both[1], *gradients[1]])


@every(["reference", *FORMS])
def test_no_tokens_leave_the_state_as_it_was(op, form):
    inputs = op.make(0)
    output, state = op.call(inputs, impl=form)
    assert output.shape[op.AXIS] == 0
    assert_same(state, inputs["initial_state"])


def test_a_step_takes_the_recurrent_form_and_more_tokens_the_chunked_one():
    state, few = {"need_state": True}, torch.rand(1, 2, 2, 4)
    for op, options in (
        (linear_attention, {"causal": True}), (hybrid_attention, {"window": 3}),
        (exponential_attention, {"log_input": few[..., 0], "log_decay": -few[..., 0]}),
    ):  # fmt: skip
        for T, impl in ((1, "recurrent"), (2, "chunked")):
            given = {name: x[:, :, :T] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            assert explain(*[few[:, :, :T]] * 3, op=op, **given, **state).impl == impl
    assert explain(few[:, 0, :1], few[0, 0].mT, op=short_convolution).impl == "recurrent"
    with pytest.raises(ValueError, match="window"):
        explain(few, few, few, op=hybrid_attention, window=-3)
