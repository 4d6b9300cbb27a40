"""The decoding step's kernel: output, next state and all gradients against fp64, in place as out of place."""

import pytest
import torch

from kernels.budget import ROUNDINGS, assert_within, moved
from kernels.device import DEVICE
from linattn.kernels.step.attend import attend_step, attend_step_, step, step_in_place
from linattn.ops.linear.api import linear_attention_with_state
from linattn.ops.shared.types import LinearState
from linattn.testing.poison import poisoned_allocations

F64 = torch.float64
DECAYS = ["none", "head", "token", "channel"]
NORMALIZERS = ["sum", "abs_max_one", None]


def make(B=2, H=4, H_kv=2, K=16, V=16, *, decay="token", state=True, dtype=torch.float32, seed=0):
    """Features >= 0, so that a row sum is far from 0."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=F64)

    q, k, v = uniform(B, H, K).to(dtype), uniform(B, H_kv, K).to(dtype), (2 * uniform(B, H_kv, V) - 1).to(dtype)
    tensors = {"q": q, "k": k, "v": v}
    if state:
        tensors |= {"kv": 4 * uniform(B, H_kv, K, V).float() - 2, "z": 3 * uniform(B, H_kv, K).float()}
    shapes = {"head": (H_kv,), "token": (B, H_kv), "channel": (B, H_kv, K)}
    if decay != "none":
        tensors["log_decay"] = -uniform(*shapes[decay]).float()
    return {name: x.to(DEVICE) for name, x in tensors.items()}


def by_kernel(t, **options):
    options = {"normalizer": "sum", "eps": 1e-6, "out_dtype": t["v"].dtype} | options
    state = LinearState(t["kv"], t["z"]) if "kv" in t else None
    output, (kv, z) = attend_step(t["q"], t["k"], t["v"], state, log_decay=t.get("log_decay"), **options)
    return output, kv, z


def by_reference(t, **options):
    state = LinearState(t["kv"], t["z"]) if "kv" in t else None
    decay = t.get("log_decay")
    decay = decay if decay is None or decay.ndim == 1 else decay.unsqueeze(2)
    q, k, v = (t[name].unsqueeze(2) for name in "qkv")
    output, (kv, z) = linear_attention_with_state(
        q, k, v, initial_state=state, causal=True, log_decay=decay, impl="reference", **options
    )
    return output.squeeze(2), kv, z


def results(run, tensors, **options):
    """Output, next state and the gradients of everything."""
    tensors = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    outputs = run(tensors, **options)
    g = torch.Generator().manual_seed(9)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=F64).to(x)).sum() for x in outputs)
    return [x.detach() for x in outputs] + list(torch.autograd.grad(loss, list(tensors.values())))


def assert_within_budget(tensors, found=None, rests=None, **options):
    """All results of the kernel, or those that are given: the output and the next state, without gradients."""
    run = results if found is None else values
    exact = run(by_reference, {name: x.double() for name, x in tensors.items()}, **options)
    a_few_roundings = run(by_reference, {name: moved(x) for name, x in tensors.items()}, **options)
    plain = run(by_reference, tensors, **options)
    found = results(by_kernel, tensors, **options) if found is None else found
    names = ["output", "kv", "z", *(f"d_{n}" for n in tensors)][: len(found)]
    for a, b in zip(found, plain, strict=True):
        assert a.dtype == b.dtype
    assert_within(*(dict(zip(names, x, strict=True)) for x in (found, exact, plain, a_few_roundings)), rests=rests)


def values(run, tensors, **options):
    return [x.detach() for x in run(tensors, **options)]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("decay_index", ["query", "key"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_values_and_gradients(decay, decay_index, normalizer):
    assert_within_budget(make(decay=decay), decay_index=decay_index, normalizer=normalizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_low_precision(dtype, normalizer):
    assert_within_budget(make(K=32, V=48, dtype=dtype), normalizer=normalizer)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (5, 130), (20, 40), (64, 128), (128, 33), (256, 256)])
def test_widths(K, V):
    assert_within_budget(make(B=1, H=2, H_kv=1, K=K, V=V, decay="channel"))


@pytest.mark.parametrize(("H", "H_kv"), [(1, 1), (6, 1), (6, 3), (5, 5)])
def test_grouped_heads(H, H_kv):
    assert_within_budget(make(H=H, H_kv=H_kv, V=40))


@pytest.mark.parametrize("decay", ["none", "token"])
def test_no_state_is_an_empty_one(decay):
    """Its output is v whatever the query, whose gradient is what rounding leaves of terms as large as with a state."""
    with_state = results(by_reference, make(decay=decay))[3]
    assert_within_budget(make(decay=decay, state=False), rests={"d_q": ROUNDINGS * with_state.abs().max().item()})


def test_the_clamp_of_abs_max_one_is_flat_below_one():
    tensors = make()
    tensors |= {"q": 1e-3 * tensors["q"]}
    assert_within_budget(tensors, normalizer="abs_max_one")
    tensors |= {"q": -1e3 * tensors["q"]}
    assert_within_budget(tensors, normalizer="abs_max_one")


def test_large_sums_stay_finite_in_half_precision():
    tensors = make(dtype=torch.float16)
    tensors["kv"], tensors["z"] = 1e6 * tensors["kv"], 1e6 * tensors["z"]
    assert_within_budget(tensors)


def test_strongest_decay_forgets():
    tensors = make(decay="token")
    tensors["log_decay"].fill_(-torch.inf)
    empty = {name: x for name, x in tensors.items() if name not in ("kv", "z", "log_decay")}
    assert_within_budget(empty, by_kernel(tensors))


def test_strides_are_followed():
    tensors = make(K=20, V=24, decay="channel")
    strided = {name: x.transpose(-1, -2).contiguous().transpose(-1, -2) for name, x in tensors.items()}
    packed = torch.cat([tensors["k"], tensors["k"], tensors["v"]], dim=-1)
    strided["k"], strided["v"] = packed[..., 20:40], packed[..., 40:]
    strided["q"] = tensors["q"].transpose(0, 1).contiguous().transpose(0, 1)
    found = by_kernel(strided)
    assert_within_budget(tensors, found)
    assert all(x.is_contiguous() for x in found)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("decay_index", ["query", "key"])
@pytest.mark.parametrize("strided", [False, True])
def test_in_place_is_the_same(normalizer, decay_index, strided):
    tensors = make(H=6, H_kv=3, K=64, V=150, decay="channel")  # several tiles of columns, the last one not full
    options = {"normalizer": normalizer, "decay_index": decay_index, "eps": 1e-6}
    kv = tensors["kv"].clone()
    if strided:
        kv = kv.transpose(-1, -2).contiguous().transpose(-1, -2)
    state = LinearState(kv, tensors["z"].clone())
    output, after = attend_step_(
        tensors["q"], tensors["k"], tensors["v"], state, log_decay=tensors["log_decay"], out_dtype=torch.float32,
        **options,
    )  # fmt: skip
    assert after.kv is state.kv
    assert after.k is state.k
    assert_within_budget(tensors, [output, *after], **options)


def test_in_place_refuses_what_it_cannot_do():
    t = make()
    options = {"log_decay": None, "normalizer": "sum", "eps": 1e-6, "out_dtype": torch.float32}
    with pytest.raises(RuntimeError, match="no gradient"):
        attend_step_(t["q"].requires_grad_(), t["k"], t["v"], LinearState(t["kv"], t["z"]), **options)
    with pytest.raises(TypeError, match=r"state\.kv must be float32"):
        attend_step_(t["q"], t["k"], t["v"], LinearState(t["kv"].bfloat16(), t["z"]), **options)


def test_steps_are_the_causal_sequence():
    g = torch.Generator().manual_seed(1)
    q, k, v = torch.rand(3, 1, 2, 9, 16, generator=g).to(DEVICE).unbind()
    decay = -torch.rand(1, 2, 9, generator=g).to(DEVICE)

    def whole(*inputs):
        output, (kv, z) = linear_attention_with_state(*inputs[:3], causal=True, log_decay=inputs[3], impl="reference")
        return {"output": output, "kv": kv, "z": z}

    inputs = q, k, v, decay
    exact = whole(*(x.double() for x in inputs))
    state, outputs, options = None, [], {"normalizer": "sum", "eps": 1e-6, "out_dtype": torch.float32}
    for t in range(9):
        now = q[:, :, t], k[:, :, t], v[:, :, t]
        output, state = attend_step(*now, state, log_decay=decay[:, :, t], **options)
        outputs.append(output)
    found = {"output": torch.stack(outputs, dim=2), "kv": state.kv, "z": state.k}
    assert_within(found, exact, whole(*inputs), whole(*(moved(x) for x in inputs)))


def test_nothing_unwritten_is_read_and_runs_are_bit_equal():
    tensors = make(K=20, V=70)
    expected = results(by_kernel, tensors)
    with poisoned_allocations():
        found = results(by_kernel, tensors)
    for a, b, c in zip(found, expected, results(by_kernel, tensors), strict=True):
        assert not a.isnan().any()
        assert torch.equal(b, c)
    for a, b in zip(found[:3], expected[:3], strict=True):  # of gradients PyTorch may choose another order of sums
        assert torch.equal(a, b)


def test_nothing_to_do():
    t = make(B=0)
    assert by_kernel(t)[0].shape == (0, 4, 16)
    t = make(V=16)
    t["v"], t["kv"] = t["v"][..., :0], t["kv"][..., :0]
    _, kv, z = by_kernel(t, normalizer=None)
    assert kv.shape == (2, 2, 16, 0)
    torch.testing.assert_close(z, t["log_decay"].exp().unsqueeze(-1) * t["z"] + t["k"])


def test_operators_are_registered_well():
    t = make(decay="channel")
    inputs = [t["q"], t["k"], t["v"], t["kv"], t["z"], t["log_decay"]]
    options = True, "sum", 1e-6, torch.float32
    torch.library.opcheck(step, (*(x.clone().requires_grad_() for x in inputs), *options))
    torch.library.opcheck(step, (*inputs[:3], None, None, None, False, None, 0.0, torch.bfloat16))
    torch.library.opcheck(step_in_place, (*inputs, *options))


def test_traced_whole():
    tensors = make()
    compiled = torch.compile(by_kernel, backend="aot_eager", fullgraph=True)
    for a, b in zip(results(compiled, tensors), results(by_kernel, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("B", "H", "D"), [(64, 32, 128), (1, 32, 128), (256, 16, 64)])
def test_decoding_sizes(B, H, D):
    assert_within_budget(make(B=B, H=H, H_kv=H, K=D, V=D, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_graph_replays_steps_in_place():
    t = make(B=8, H=8, H_kv=4, K=128, V=128, dtype=torch.bfloat16)
    options = {"log_decay": t["log_decay"], "normalizer": "sum", "eps": 1e-6, "out_dtype": torch.bfloat16}
    inputs = t["q"], t["k"], t["v"]
    state, expected = LinearState(t["kv"].clone(), t["z"].clone()), LinearState(t["kv"].clone(), t["z"].clone())
    attend_step_(*inputs, LinearState(t["kv"].clone(), t["z"].clone()), **options)  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = attend_step_(*inputs, state, **options)
    for _ in range(5):
        graph.replay()
        right, expected = attend_step(*inputs, expected, **options)
    torch.cuda.synchronize()
    torch.testing.assert_close(output, right)
    for a, b in zip(state, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
