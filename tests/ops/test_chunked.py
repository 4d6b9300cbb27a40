"""What is particular to the chunked form: strong decays, long sequences, memory, odd inputs."""

import pytest
import torch
from torch import Tensor

from linattn import linear_attention, linear_attention_with_state
from linattn.ops.linear.chunked import scan
from linattn.ops.maps import EluPlusOne


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def decays(kind: str, B: int, H: int, T: int, K: int) -> Tensor | None:
    shapes = {"head": (H,), "token": (B, H, T), "channel": (B, H, T, K)}
    return -random(*shapes[kind], seed=7).abs() if kind in shapes else None


@pytest.mark.parametrize("kind", ["token", "channel"])
def test_strong_decays_beside_weak_ones_keep_fp32_precision(kind: str) -> None:
    """A long sum of strong decays must not cost the weak ones their digits."""
    T, K = 200, 8
    q, k, v = (random(1, 1, T, K, seed=i).abs() for i in range(3))
    shape = (1, 1, T) if kind == "token" else (1, 1, T, K)
    strong = random(*shape, seed=5) > 0
    a = torch.where(strong, -150.0, -0.01 * random(*shape, seed=6).abs())
    inputs = [x.requires_grad_() for x in (q, k, v, a)]
    low = [x.detach().float().requires_grad_() for x in inputs]
    exact = linear_attention(*inputs[:3], causal=True, log_decay=inputs[3], impl="reference")
    found = linear_attention(*low[:3], causal=True, log_decay=low[3])
    # fp32 rounds each of the log-decays themselves to 1e-5 at -150; beyond that only sums of ~200 terms round
    assert (found - exact).abs().max() < 1e-6 * exact.abs().max()
    for g, e in zip(torch.autograd.grad(found.sum(), low), torch.autograd.grad(exact.sum(), inputs), strict=True):
        assert g.isfinite().all()
        assert (g - e).abs().max() < 1e-5 * e.abs().max()


@pytest.mark.parametrize("numbers", [1, 300, 1 << 19])
@pytest.mark.parametrize("kind", ["none", "head", "token", "channel"])
def test_result_does_not_depend_on_how_work_is_blocked(
    monkeypatch: pytest.MonkeyPatch, numbers: int, kind: str
) -> None:
    monkeypatch.setitem(scan._BLOCK_NUMBERS, "cpu", numbers)
    q, k, v = (random(3, 2, 131, 4, seed=i).requires_grad_() for i in range(3))
    a = decays(kind, 3, 2, 131, 4)
    outputs = [linear_attention(q, k, v, causal=True, log_decay=a, normalizer=None, impl=i)
               for i in ("recurrent", "chunked")]  # fmt: skip
    assert (outputs[0] - outputs[1]).abs().max() < 1e-12 * outputs[0].abs().max()
    weight = random(*outputs[0].shape, seed=9)
    grads = [torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in outputs]
    for one, two in zip(*grads, strict=True):
        assert (one - two).abs().max() < 1e-12 * one.abs().max()


def test_inputs_may_lie_in_memory_as_a_projection_left_them() -> None:
    """(B, T, H, D) transposed, a slice of a wider tensor, and expanded batches give what a copy gives."""
    wide = random(2, 130, 3, 4, 8)
    q, k, v = wide.transpose(1, 3).unbind(2)  # (B, H, T, D) views
    assert not q.is_contiguous()
    expected = linear_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True, normalizer=None)
    assert torch.equal(linear_attention(q, k, v, causal=True, normalizer=None), expected)
    one = q[:1].expand(2, -1, -1, -1)
    assert torch.equal(
        linear_attention(one, k, v, causal=True, normalizer=None),
        linear_attention(one.contiguous(), k, v, causal=True, normalizer=None),
    )


def test_autocast_leaves_sums_and_states_in_fp32() -> None:
    q, k, v = (random(1, 2, 300, 8, seed=i, dtype=torch.float32).abs() for i in range(3))
    plain = linear_attention_with_state(q, k, v, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = linear_attention_with_state(q, k.bfloat16().float(), v, causal=True)
        mixed = linear_attention(q, k.bfloat16(), v, causal=True)
    assert cast.output.dtype == mixed.dtype == torch.bfloat16
    assert cast.state.kv.dtype == torch.float32
    rounding = 2**-8  # of k and of the output in bf16, relative
    assert (cast.output.float() - plain.output).abs().max() < 2 * rounding * plain.output.abs().max()
    assert torch.equal(cast.output, mixed)


@pytest.mark.parametrize("kind", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("causal", [True, False])
def test_one_compiled_graph_serves_every_length(kind: str, causal: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, mask: Tensor) -> Tensor:
        return linear_attention(q, k, v, causal=causal, log_decay=a, key_mask=mask, feature_map=EluPlusOne())

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (70, 131, 200):
        q, k, v = (random(2, 2, T, 4, seed=i) for i in range(3))
        mask = random(2, T, seed=4) > -1
        arguments = (q, k, v, decays(kind, 2, 2, T, 4), mask)
        with torch.compiler.set_stance("default" if T == 70 else "fail_on_recompile"):
            found = compiled(*arguments)
        assert (found - call(*arguments)).abs().max() < 1e-12


@pytest.mark.parametrize("causal", [True, False])
def test_a_state_may_lie_in_memory_in_any_order(causal: bool) -> None:
    """What compiled code expects of the next state is told by its shape alone."""
    q, k, v = (random(2, 2, 40, 4, seed=i).abs() for i in range(3))
    kv, z = random(2, 2, 4, 4, seed=3).abs().mT, random(2, 2, 4, seed=4).abs()
    op = torch.ops.linattn.chunk_scan if causal else torch.ops.linattn.total
    options = (None, None, 32, False, False) if causal else (None,)
    torch.library.opcheck(op.default, (q, k, v, kv, z, *options))
