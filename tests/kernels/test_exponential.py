"""``exponential_attention(impl="triton")``: gates of any size, masks, packing, states and steps, against fp64."""

import pytest
import torch

from kernels.budget import assert_within, moved
from kernels.device import DEVICE
from kernels.exponential_case import B, T, draw
from linattn import exponential_attention, exponential_attention_step, exponential_attention_with_state
from linattn.kernels.exponential import config as exponential_config
from linattn.kernels.exponential.library import triton_exponential
from linattn.ops.exponential.call import ExponentialState
from linattn.testing.poison import poisoned_allocations


def run(tensors, impl, *, mask=None, gradients=True, **options):
    t = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    initial = ExponentialState(t["kv"], t["z"], t["log_scale"]) if "kv" in t else None
    output, (kv, z, m) = exponential_attention_with_state(
        t["q"], t["k"], t["v"], log_input=t["log_input"], log_decay=t["log_decay"], initial_state=initial, impl=impl,
        key_mask=mask, **options,
    )  # fmt: skip
    if mask is not None:
        output = output * mask[:, None, :, None]
    found = {"output": output, "final kv": kv, "final z": z, "unit": m}
    g = torch.Generator().manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, generator=g).to(DEVICE).double()).sum() for x in found.values())
    grads = torch.autograd.grad(loss, list(t.values()), materialize_grads=True, allow_unused=True)
    found = {name: x.detach() for name, x in found.items()}
    return found | {f"d {name}": x for name, x in zip(t, grads, strict=True)}


def check(tensors, **options):
    exact = run({name: x.double() for name, x in tensors.items()}, "reference", **options)
    others = [run(tensors, impl, **options) for impl in ("reference", "chunked")]
    # Gates are added up in fp64 by plain PyTorch, in fp32 by the kernel.
    others.append(run({name: moved(x) for name, x in tensors.items()}, "reference", **options))
    assert_within(run(tensors, "triton", **options), exact, *others, summed=T**0.5, inputs=tensors["v"].dtype)


@pytest.mark.parametrize("gate", [0.1, 2.0, 20.0])
def test_gates_of_all_sizes(gate):
    check(draw(gate=gate))


@pytest.fixture
def apart(monkeypatch):
    """Row sums in a kernel of their own, which only wide heads in bf16 take by themselves."""
    monkeypatch.setitem(exponential_config.TRIAL, exponential_config.OUTPUT, {"apart": 1})


@pytest.mark.parametrize("kind", ["steep", "closed", "segments", "parts"])
def test_chunks(kind, monkeypatch):
    """A decay that no factor in fp32 holds cuts chunks short, one that forgets everything to single tokens."""
    # Parts are of two bf16 numbers. The interpreter, which cannot multiply them, is told to take fp32 in parts.
    wide = kind == "parts" and DEVICE == "cuda"
    size = {"width": 128, "values": 64, "dtype": torch.bfloat16} if wide else {}
    tensors = draw(length=150 if kind == "segments" else 70, rows=1, state=True, **size)
    if kind == "steep":
        tensors["log_decay"] *= 40
    if kind == "closed":
        tensors["log_decay"][..., [7, 40, 41]] = -torch.inf
        tensors["log_input"][..., [3, 9, 41]] = -torch.inf
    if kind == "parts":
        tensors["log_decay"][..., 35:] *= 40
    if kind == "parts" and not wide:  # which only wide heads in bf16 take by themselves
        trial = {exponential_config.OUTPUT: 8, exponential_config.D_Q: 16, exponential_config.D_K: 16}
        monkeypatch.setattr(exponential_config, "TRIAL", {role: {"parts": n} for role, n in trial.items()})
    if kind == "segments":
        monkeypatch.setattr(exponential_config, "TRIAL_SEGMENTS", [2])
    with poisoned_allocations():
        check(tensors)


@pytest.mark.parametrize("rows", ["inside", "apart"])
def test_a_denominator_that_is_a_small_difference_keeps_its_digits(rows, request):
    """Signed keys: rounded to bf16 with their gates, as the kernel once took them, they use twice the budget."""
    if rows == "apart":
        request.getfixturevalue("apart")
    check(draw(length=70, rows=1, dtype=torch.bfloat16, signed=True, gate=1.0))


def test_row_sums_apart(apart, monkeypatch):
    """From a state, into segments of which one is steep and makes its own; packed, with an empty sequence."""
    tensors = draw(length=150, rows=1, state=True, width=48)
    tensors["log_decay"][..., 140:] *= 40
    with poisoned_allocations():
        monkeypatch.setattr(exponential_config, "TRIAL_SEGMENTS", [2])
        check(tensors)
        monkeypatch.setattr(exponential_config, "TRIAL_SEGMENTS", [])
        check(draw(rows=1, state=True, sequences=3), cu_seqlens=torch.tensor([0, 5, 5, T], device=DEVICE))


def test_strong_decays_have_a_gradient_through_a_rounded_output():
    """q . dq taken as 0 while k . dk knows an output rounded to bf16: the decays got twice their budget and more."""
    tensors = draw(length=100, rows=1, dtype=torch.bfloat16, width=32, values=32, gate=1.0)
    tensors["log_decay"] *= 30
    found, plain = (run(tensors, impl) for impl in ("triton", "reference"))
    exact = run({name: x.double() for name, x in tensors.items()}, "reference")
    name = "d log_decay"
    assert_within({name: found[name]}, {name: exact[name]}, {name: plain[name]}, inputs=torch.bfloat16)


def test_it_starts_from_a_state_with_a_unit():
    check(draw(state=True))


def test_runs_are_equal():
    tensors = draw(state=True)
    for a, b in zip(run(tensors, "triton").values(), run(tensors, "triton").values(), strict=True):
        assert torch.equal(a, b)


def test_operator_is_registered_well():
    t = {name: x.requires_grad_() for name, x in draw(state=True, length=5).items()}
    arguments = (*(t[n] for n in ("q", "k", "v", "log_input", "log_decay", "kv", "z", "log_scale")), None, 0.25)
    torch.library.opcheck(
        triton_exponential, (*arguments, torch.float32, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


def test_low_precision_and_odd_widths():
    check(draw(width=20, values=9, dtype=torch.bfloat16))


def test_half_precision_does_not_overflow():
    tensors = draw(dtype=torch.float16, gate=20.0)
    found = run(tensors, "triton")
    assert all(x.isfinite().all() for x in found.values())
    check(tensors)


def test_masked_tokens_are_not_there():
    mask = (torch.rand(B, T, generator=torch.Generator().manual_seed(2)) > 0.3).to(DEVICE)
    tensors = draw()
    check(tensors, mask=mask)
    padding = ~mask[:, None, :]
    options = {"key_mask": mask, "impl": "triton"}
    names = "q", "k", "v", "log_input", "log_decay"
    broken = {
        name: tensors[name].masked_fill(padding.unsqueeze(-1) if tensors[name].ndim == 4 else padding, torch.nan)
        for name in names[1:]
    }
    outputs = [
        exponential_attention(t["q"], t["k"], t["v"], log_input=t["log_input"], log_decay=t["log_decay"], **options)
        for t in (tensors, tensors | broken)
    ]
    assert torch.equal(*outputs)


def test_packed_sequences_have_a_state_each():
    offsets = torch.tensor([0, 5, 5, T], device=DEVICE)
    check(draw(rows=1, state=True, sequences=3), cu_seqlens=offsets)


def test_an_empty_sequence_hands_its_state_on():
    """Its unit is a constant, so that of the first one gets the gradient of the sums."""
    tensors = draw(rows=1, state=True, sequences=3)
    offsets = torch.tensor([0, 5, 5, T], device=DEVICE)
    found = run(tensors, "triton", cu_seqlens=offsets)
    for final, first in (("final kv", "kv"), ("final z", "z"), ("unit", "log_scale")):
        assert torch.equal(found[final][1], tensors[first][1])
    whole = sum((tensors[name] * found[f"d {name}"])[1].flatten(1).sum(1) for name in ("kv", "z"))
    torch.testing.assert_close(found["d log_scale"][1], whole, rtol=1e-5, atol=1e-5)
    assert whole.abs().min() > 0.1


def test_a_query_of_zeros_has_a_finite_gradient():
    tensors = draw(gate=20.0)
    found = run(tensors | {"q": torch.zeros_like(tensors["q"])}, "triton")
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize(("state", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.float16)])
def test_one_token_takes_the_kernel_of_a_step(state, dtype):
    check(draw(length=1, state=state, dtype=dtype))


def test_steps_are_the_sequence():
    """Of which the first adds nothing to an empty state."""
    tensors = draw(length=6)
    tensors["log_input"][:, :, 0] = -torch.inf
    whole = exponential_attention_with_state(
        *(tensors[n] for n in "qkv"), log_input=tensors["log_input"], log_decay=tensors["log_decay"], impl="reference"
    )
    state = None
    for t in range(6):
        now = {name: x[:, :, t : t + 1] for name, x in tensors.items()}
        output, state = exponential_attention_with_state(
            now["q"], now["k"], now["v"], log_input=now["log_input"], log_decay=now["log_decay"], initial_state=state,
            impl="triton",
        )  # fmt: skip
        torch.testing.assert_close(output[:, :, 0], whole.output[:, :, t], rtol=1e-5, atol=1e-5)
    for a, b in zip(state, whole.state, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_traced_whole():
    tensors = draw(length=9)
    options = {"log_input": tensors["log_input"], "log_decay": tensors["log_decay"], "impl": "triton"}
    compiled = torch.compile(exponential_attention, backend="aot_eager", fullgraph=True)
    q, k, v = (tensors[name] for name in "qkv")
    found = compiled(q, k, v, **options)
    torch.testing.assert_close(found, exponential_attention(q, k, v, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("signed", [False, True])
def test_long_sequences(dtype, signed):
    check(draw(width=64, values=128, length=1500, dtype=dtype, signed=signed, gate=1.0))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_graph_replays_the_public_step():
    t = draw(width=64, values=64, length=1, dtype=torch.bfloat16, state=True)
    now = {name: t[name][:, :, 0] for name in ("q", "k", "v", "log_input", "log_decay")}
    gates = {name: now.pop(name) for name in ("log_input", "log_decay")}
    start = ExponentialState(t["kv"], t["z"], t["log_scale"])
    held = ExponentialState(*(x.clone() for x in start))

    def decode(state):
        return exponential_attention_step(now["q"], now["k"], now["v"], state, **gates)

    with torch.no_grad():
        decode(held)  # compiles before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, state = decode(held)
            for old, new in zip(held, state, strict=True):
                old.copy_(new)
        for _ in range(4):
            graph.replay()
            right, start = decode(start)
    torch.cuda.synchronize()
    assert torch.equal(captured, right)
    for a, b in zip(held, start, strict=True):
        assert torch.equal(a, b)
