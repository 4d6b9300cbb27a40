"""``linear_attention(impl="triton")``: every option of a call reaches a kernel and gives what the definition gives."""

import pytest
import torch
import torch.nn.functional as F

from kernels.budget import assert_within, moved
from kernels.device import DEVICE
from linattn import create_mechanism, linear_attention, linear_attention_step, linear_attention_with_state
from linattn.kernels import linear
from linattn.kernels.common import which_kernel
from linattn.ops.linear.call import LinearCall
from linattn.ops.maps import EluPlusOne, TaylorExp, UnitSilu
from linattn.ops.shared.types import LinearState
from linattn.testing import check_forms, check_padding, subject_of

B, H, H_KV, T = 2, 2, 1, 18
DECAYS = {
    "none": None, "head": (H_KV,), "token": (B, H_KV, T), "channel": (B, H_KV, T, 16),
}  # fmt: skip
SERVED = [(causal, decay) for causal in (True, False) for decay in DECAYS if causal or decay != "channel"]
# Kernels take no fp64, so the contracts are held in fp32: the same as on a GPU, in the interpreter.
PLACE = {"device": DEVICE, "dtype": torch.float32, "impls": ("triton",)}


def draw(
    decay="none", *, width=16, values=16, dtype=torch.float32, norm_features=False, state=False, packed=False,
    weighed=False,
):  # fmt: skip
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    rows = 1 if packed else B
    tensors = {"q": randn(rows, H, T, width), "k": randn(rows, H_KV, T, width), "v": randn(rows, H_KV, T, values)}
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    shape = DECAYS[decay]
    if shape is not None:
        shape = (*shape[:3], width) if len(shape) == 4 else shape
        tensors["log_decay"] = F.logsigmoid(randn(*shape) + 2)[: rows if len(shape) > 1 else None]
    if norm_features:
        tensors["norm_q"], tensors["norm_k"] = (randn(rows, h, T, width).abs().to(dtype) for h in (H, H_KV))
    if weighed:
        tensors["log_input"] = F.logsigmoid(randn(rows, H_KV, T))
    if state:
        n = 3 if packed else rows
        tensors["kv"], tensors["z"] = randn(n, H_KV, width, values), randn(n, H_KV, width).abs()
    return {name: x.to(DEVICE) for name, x in tensors.items()}


def run(tensors, impl, *, state=False, mask=None, **options):
    """Output, final state and all gradients; what masked queries give carries no meaning."""
    t = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    options |= {"impl": impl, "log_decay": t.get("log_decay"), "log_input": t.get("log_input")}
    options |= {"key_mask": mask}
    if "norm_q" in t:
        options["norm_features"] = t["norm_q"], t["norm_k"]
    initial = LinearState(t["kv"], t["z"]) if "kv" in t else None
    if state:
        output, (kv, z) = linear_attention_with_state(t["q"], t["k"], t["v"], initial_state=initial, **options)
        found = {"output": output, "final kv": kv, "final z": z}
    else:
        found = {"output": linear_attention(t["q"], t["k"], t["v"], **options)}
    if mask is not None:
        found["output"] = found["output"] * mask[:, None, :, None]
    g = torch.Generator().manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, generator=g).to(DEVICE).double()).sum() for x in found.values())
    gradients = torch.autograd.grad(loss, list(t.values()), materialize_grads=True, allow_unused=True)
    return {name: x.detach() for name, x in found.items()} | {
        f"d {name}": x for name, x in zip(t, gradients, strict=True)
    }


def check(tensors, **options):
    wide = {name: x.double() for name, x in tensors.items()}
    exact = run(wide, "reference", **options)
    others = [run(tensors, impl, **options) for impl in ("reference", "chunked")]
    others.append(run({name: moved(x) for name, x in tensors.items()}, "reference", **options))
    assert_within(run(tensors, "triton", **options), exact, *others, summed=T**0.5, inputs=tensors["v"].dtype)


def mapped(normalizer):
    """Features >= 0 under a normaliser, so that a row sum is far from 0."""
    return {"normalizer": normalizer, "feature_map": None if normalizer is None else EluPlusOne()}


@pytest.mark.parametrize(("causal", "decay"), SERVED)
@pytest.mark.parametrize("normalizer", ["sum", "abs_max_one", None])
def test_every_decay_and_normalizer(causal, decay, normalizer):
    check(draw(decay), causal=causal, **mapped(normalizer))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("decay", ["none", "token"])
def test_a_denominator_of_its_own(causal, decay):
    check(draw(decay, norm_features=True, state=causal), causal=causal, state=causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_denominator_of_its_own_of_wide_heads(dtype):
    """No program holds their state: the gradient of a numerator, in fp32, meets queries of 16 bits."""
    check(draw(width=192, values=96, dtype=dtype, norm_features=True), causal=False)


@pytest.mark.parametrize(("causal", "decay"), [(True, "token"), (True, "channel"), (False, "none")])
def test_weights_of_keys(causal, decay):
    """Inside the kernels that take them, before the others; own denominators and features of a map alike."""
    state = causal or decay == "none"
    check(draw(decay, weighed=True, norm_features=True, state=state), causal=causal, state=state)
    tensors = draw(decay, weighed=True)
    mask = (torch.rand(B, T, generator=torch.Generator().manual_seed(2)) > 0.3).to(DEVICE)
    check(tensors, causal=causal, mask=mask, **mapped("sum"))
    one = {name: x[:, :, :1] for name, x in tensors.items()}
    if causal:
        check(one, causal=True, state=True, normalizer=None)


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
@pytest.mark.parametrize("index", ["key", "query"])
def test_states_go_in_and_out(decay, index):
    check(draw(decay, state=True), causal=True, state=True, decay_index=index, **mapped("sum"))


def test_a_state_of_all_keys():
    check(draw(state=True), state=True, **mapped("sum"))


@pytest.mark.parametrize(("causal", "decay"), [(c, d) for c, d in SERVED if d != "head"])
def test_masked_tokens_are_not_there(causal, decay):
    mask = (torch.rand(B, T, generator=torch.Generator().manual_seed(2)) > 0.3).to(DEVICE)
    tensors = draw(decay)
    check(tensors, causal=causal, mask=mask, **mapped("sum"))
    options = {"causal": causal, "key_mask": mask, "log_decay": tensors.get("log_decay"), "feature_map": EluPlusOne()}
    padding = ~mask[:, None, :, None]
    broken = [x.masked_fill(padding, torch.nan) for x in (tensors["k"], tensors["v"])]
    found = linear_attention(tensors["q"], *broken, impl="triton", **options)
    assert torch.equal(found, linear_attention(tensors["q"], tensors["k"], tensors["v"], impl="triton", **options))


@pytest.mark.parametrize(("causal", "state"), [(True, True), (False, False)])
@pytest.mark.parametrize("decay", ["none", "token"])
def test_packed_sequences(causal, state, decay):
    offsets = torch.tensor([0, 4, 4, T], device=DEVICE)
    check(draw(decay, packed=True, state=state), causal=causal, state=state, cu_seqlens=offsets, **mapped("sum"))


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_odd_widths_of_16_bits_are_filled_up(decay):
    """With columns of zeros, which come off again: of outputs, states and gradients."""
    check(draw(decay, width=20, values=9, dtype=torch.bfloat16, state=True), causal=True, state=True, **mapped("sum"))
    if decay != "channel":
        check(draw(decay, width=20, values=9, dtype=torch.bfloat16), **mapped("sum"))


@pytest.mark.parametrize(("causal", "decay"), [(True, "none"), (True, "token"), (True, "channel"), (False, "token")])
@pytest.mark.parametrize(("width", "dtype"), [(20, torch.bfloat16), (48, torch.float32), (24, torch.float16)], ids=str)
def test_a_map_that_looks_along_a_row(causal, decay, width, dtype):
    """Columns that fill a tile up have a value of their own, 1/2: it belongs to no length."""
    mask = (torch.rand(B, T, generator=torch.Generator().manual_seed(2)) > 0.3).to(DEVICE)
    check(draw(decay, width=width, dtype=dtype), causal=causal, feature_map=UnitSilu())
    check(draw(decay, width=width, dtype=dtype), causal=causal, feature_map=UnitSilu(), mask=mask)


@pytest.mark.parametrize("width", [16, 20])
def test_padding_before_a_map_that_looks_along_a_row(width):
    """Inside the kernels of attention and before them: what padding holds is not seen, and gets no gradient."""
    tensors, padding = draw(width=width), torch.arange(B * T, device=DEVICE).reshape(B, 1, T, 1) % 3 == 1
    found = []
    for hidden in (0.0, torch.nan):
        leaves = {name: x.masked_fill(padding, hidden) for name, x in tensors.items() if name != "q"}
        leaves = {name: x.requires_grad_() for name, x in ({"q": tensors["q"]} | leaves).items()}
        out = linear_attention(**leaves, feature_map=UnitSilu(), key_mask=~padding[:, 0, :, 0], impl="triton")
        found.append([out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))])
        assert not any(x.masked_fill(~padding, 0).any() for x in found[-1][2:])
    assert all(torch.equal(zeros, nans) for zeros, nans in zip(*found, strict=True))


def test_a_map_without_a_twin_hands_over_its_features():
    tensors = draw(width=4)
    assert TaylorExp().twin() is None
    check(tensors, causal=True, feature_map=TaylorExp())
    check(tensors, feature_map=TaylorExp())


@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("norm_features", [False, True])
def test_one_token_takes_the_kernel_of_a_step(decay, norm_features):
    t = draw(decay, norm_features=norm_features, state=True)
    one = {name: x if x.ndim == 1 or name in ("kv", "z") else x[:, :, :1] for name, x in t.items()}
    call = LinearCall(one["q"], one["k"], one["v"], causal=True, log_decay=one.get("log_decay"), need_state=True)
    assert which_kernel.kernel_of(call) == which_kernel.STEP
    check(one, causal=True, state=True)


def test_dtypes_that_autocast_mixes():
    t = draw()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = linear_attention(t["q"].bfloat16(), t["k"], t["v"], impl="triton", **mapped("sum"))
    assert found.dtype == torch.bfloat16
    exact = linear_attention(t["q"].bfloat16().double(), t["k"].double(), t["v"].double(), impl="reference",
                             **mapped("sum"))  # fmt: skip
    assert_within({"output": found}, {"output": exact}, {"output": exact.bfloat16()})


@pytest.mark.parametrize("name", ["elu", "pola", "mirror"])
def test_mechanisms_in_the_contract_of_forms(name):
    """Their maps inside the kernel, grouped heads too where a mechanism has them."""
    assert check_forms(subject_of(name, {"causal": False}, head_dim=16, **PLACE), lengths=(33,))


def test_a_mechanism_with_a_decay_in_the_contract_of_padding():
    assert check_padding(subject_of("retention", {"bidirectional": False}, head_dim=16, num_heads=1, **PLACE))


def test_mechanisms_decode_with_the_state_of_a_kernel():
    """Prefill by kernels, then step by step: as the whole."""
    mechanism = create_mechanism("elu", num_heads=2, head_dim=16, causal=True, impl="triton").to(DEVICE)
    q, k, v = torch.randn(3, 1, 2, 12, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE).unbind()
    whole = mechanism(q, k, v)
    output, state = mechanism.with_state(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    torch.testing.assert_close(output, whole[:, :, :9], rtol=1e-5, atol=1e-5)
    for t in range(9, 12):
        output, state = mechanism.step(q[:, :, t], k[:, :, t], v[:, :, t], state)
        torch.testing.assert_close(output, whole[:, :, t], rtol=1e-5, atol=1e-5)


def test_nothing_is_refused_that_a_kernel_serves():
    t = draw("token")
    for options in ({}, {"causal": True}, {"log_decay": t["log_decay"]}, {"causal": True, "log_decay": t["log_decay"]}):
        assert linear.against(LinearCall(t["q"], t["k"], t["v"], **options)) == ""


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("decay", ["none", "token"])
def test_a_graph_replays_the_public_step(decay):
    """No wait for the device and no look at values on the way: a decoding loop is captured once."""
    t = draw(decay, width=64, values=64, dtype=torch.bfloat16, state=True)
    now = {name: x[:, :, 0] for name, x in t.items() if name in ("q", "k", "v", "log_decay")}
    options = {"log_decay": now.pop("log_decay", None), "feature_map": EluPlusOne()}
    held = LinearState(t["kv"].clone(), t["z"].clone())

    def decode():
        output, state = linear_attention_step(now["q"], now["k"], now["v"], held, **options)
        held.kv.copy_(state.kv)
        held.k.copy_(state.k)
        return output

    with torch.no_grad():
        decode()  # compiles before the capture
        held.kv.copy_(t["kv"])
        held.k.copy_(t["z"])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = decode()
        expected = LinearState(t["kv"], t["z"])
        for _ in range(4):
            graph.replay()
            right, expected = linear_attention_step(now["q"], now["k"], now["v"], expected, **options)
    torch.cuda.synchronize()
    assert torch.equal(captured, right)
    assert torch.equal(held.kv, expected.kv)
    assert torch.equal(held.k, expected.k)
