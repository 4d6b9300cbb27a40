"""The kernels' operators keep PyTorch's contract, and calls of them compile into one graph that gives the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from contracts.test_opcheck import KERNELS, Recorder, opcheck
from kernels.budget import BF16, FP32, Tensors, evaluate
from kernels.case import Case
from kernels.device import DEVICE
from linattn import linear_attention
from linattn.kernels.convolution.library import convolution_step, convolution_step_in_place
from linattn.kernels.step.attend import step_in_place
from linattn.layers import Attention, rotary
from linattn.ops.convolution.api import short_convolution_with_state
from linattn.ops.convolution.call import ConvolutionState
from linattn.ops.hybrid.types import SalientBudget
from linattn.ops.reflection.api import pair_matrices, reflect_heads
from linattn.ops.reflection.types import Modulation
from ops.hybrid_cases import call as hybrid

Call = Callable[[Tensors, str], Tensors]


def normal(**shapes: tuple[int, ...]) -> Tensors:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g).to(DEVICE) for name, shape in shapes.items()}


def convolved(t: Tensors, impl: str) -> Tensors:
    state, mask = ConvolutionState(t["start"]), torch.arange(t["x"].shape[1], device=DEVICE)[None] != 1
    options = {"activation": "silu", "residual": True, "impl": impl, "key_mask": mask if t["x"].shape[1] > 1 else None}
    output, (last,) = short_convolution_with_state(t["x"], t["weight"], t["bias"], initial_state=state, **options)
    return {"output": output, "last": last}


def reflected(t: Tensors, impl: str) -> Tensors:
    mask = torch.arange(5, device=DEVICE)[None] != 1
    out = reflect_heads(t["q"], t["k"], t["normals"], key_mask=mask, variance=True, impl=impl)
    return {"q": out.q, "k": out.k, "variance": out.variance}


def paired(t: Tensors, impl: str) -> Tensors:
    options = (t["variance"].exp(), Modulation(t["amplitude"], t["gain"], t["bias"])) if "variance" in t else ()
    return dict(zip(("own", "other"), pair_matrices(t["angles"], *options, impl=impl), strict=True))


def mixed(t: Tensors, impl: str) -> Tensors:
    given = {name: t[name] for name in ("q", "k", "v")} | {"features": (t["phi"].exp(), t["psi"].exp())}
    parts = [{n: tuple(y[:, :, s] for y in x) if isinstance(x, tuple) else x[:, :, s] for n, x in given.items()}
             for s in (slice(0, 40), slice(40, None))]  # fmt: skip
    options = {"window": 32, "layout": "chunks", "budget": SalientBudget(1 / 8, 32, cap=3), "impl": impl}
    first = hybrid(parts[0], True, **options)
    output, state = hybrid(parts[1], True, initial_state=first.state, **options)
    return {"output": output, "kv": state.linear.kv}


SMALL = {"K": 16, "V": 16, "T": 9}
CALLS: dict[str, tuple[Call, Tensors]] = {
    "all keys": Case(**SMALL, start=True),
    "all keys, no state": Case(**SMALL, layout="tokens"),
    "all keys, map": Case(**SMALL, B=2, map="nala_masked", start=True),
    "all keys, constant feature": Case(**SMALL, map="squares"),
    "all keys, segments": Case(T=70, map="mirror", B=2, H_kv=2, path="long"),
    "causal": Case(**SMALL, causal=True, decay="token", start=True, weighed=True),
    "causal, no state": Case(**SMALL, causal=True, layout="tokens"),
    "both ways": Case(**SMALL, decay="token", dtype=BF16),
    "channel": Case(K=4, V=4, T=5, causal=True, decay="channel", start=True),
    "step": Case(**SMALL | {"T": 1}, causal=True, decay="channel", start=True),
    "exponential": Case(**SMALL, gate=1.0, decay="token", start=True),
    "exponential step": Case(**SMALL | {"T": 1}, gate=1.0, decay="token", start=True, norm=None),
    **{f"map {name}": Case(B=2, H_kv=2, K=4, V=4, T=5, map=name)
       for name in ("mirror", "pola_plus", "focused", "squares")},
    "turned": Case(B=2, H_kv=2, K=8, plane=(3, 7), map="pola_plus", mask=True),
    "turned, scaled": Case(B=2, H_kv=2, K=8, plane=(3, 7), map="nala_masked"),
}  # fmt: skip
CALLS = {name: (case, case.t) for name, case in CALLS.items()} | {
    "convolution": (convolved, normal(x=(1, 5, 3), weight=(3, 4), bias=(3,), start=(1, 3, 3))),
    "convolution step": (convolved, normal(x=(1, 1, 3), weight=(3, 4), bias=(3,), start=(1, 3, 3))),
    "reflection": (reflected, normal(q=(1, 2, 5, 4), k=(1, 2, 5, 4), normals=(2, 2, 1, 4))),
    "pairs": (paired, normal(angles=(2, 2, 2))),
    "pairs, modulated": (
        paired, normal(angles=(2, 2, 2), variance=(3, 2, 1, 2), amplitude=(2, 2), gain=(2, 2), bias=(2, 2)),
    ),
    "hybrid": (mixed, normal(q=(1, 2, 104, 4), k=(1, 1, 104, 4), v=(1, 1, 104, 4), phi=(1, 2, 104, 6),
                             psi=(1, 1, 104, 6))),
}  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name == "hybrid" else ()) for name in CALLS
])  # fmt: skip
def test_operators(name: str) -> None:
    """Schema, fake tensors that lie as results do, autograd, ahead-of-time tracing."""
    call, t = CALLS[name]
    with Recorder() as recorder:
        evaluate(call, t, "triton")
    assert recorder.calls
    assert {func.name() for func, _ in recorder.calls} <= KERNELS
    opcheck(recorder.calls)


def test_no_operator_is_left_out() -> None:
    seen = {f"linattn::triton_{name}" for name in ("step_", "convolution_step", "convolution_step_")}  # below
    for call, t in CALLS.values():
        with Recorder() as recorder:
            evaluate(call, t, "triton")
        seen |= {func.name().split(".")[0] for func, _ in recorder.calls}
    assert seen == {name.split(".")[0] for name in KERNELS}


def test_operators_of_decoding_without_gradients() -> None:
    t = {name: x if name in ("kv", "z") else x.squeeze(2) for name, x in CALLS["step"][1].items()}
    inputs = (t[name] for name in ("q", "k", "v", "kv", "z", "log_decay"))
    torch.library.opcheck(step_in_place, (*inputs, True, "sum", 1e-6, FP32))
    t = CALLS["convolution step"][1]
    for operator in (convolution_step, convolution_step_in_place):
        torch.library.opcheck(operator, (t["x"][:, 0], t["weight"], t["bias"], t["start"], True, True, FP32))


@pytest.mark.parametrize("name", ["all keys, map", "causal", "both ways", "channel", "step", "exponential",
                                  "exponential step", "turned", "convolution", "reflection"])  # fmt: skip
def test_compiles_into_one_graph(name: str) -> None:
    call, t = CALLS[name]

    def run(x: Tensors) -> Tensors:
        return call(x, "triton")

    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found, expected = (evaluate(lambda x, _, one=one: one(x), t, "") for one in (compiled, run))
    for key, x in expected.items():
        torch.testing.assert_close(found[key], x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["nala", "pola_plus", "mirror"])
def test_a_layer_compiles_into_one_graph(name: str) -> None:
    """The same numbers, with tables of rotary positions that are made inside the graph; mirror under autocast."""
    torch.manual_seed(0)
    layer = Attention(32, 2, name, impl="triton", num_prefix_tokens=1, rotary="blocks").to(DEVICE)
    x = torch.randn(2, 16, 32).to(DEVICE)

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with torch.autocast(DEVICE, BF16, enabled=name == "mirror"):
            out = run(leaf, spatial_shape=(3, 5))
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [leaf, *layer.parameters()])]

    eager = gradients(layer)
    torch.compiler.reset()
    rotary._kept.clear()
    for a, b in zip(gradients(torch.compile(layer, fullgraph=True, backend="aot_eager")), eager, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not rotary._kept


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_who_watches_sees_operators_that_compute_the_same(options: dict[str, Any]) -> None:
    """Eager calls go past the dispatcher; a mode, or a tensor of a subclass, does not change the numbers."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(str(func))
            return func(*args, **kwargs or {})

    class Own(Tensor):
        pass

    seen: set[str] = set()
    leaves = [x.requires_grad_() for x in torch.rand(3, 1, 2, 20, 16).to(DEVICE).unbind()]
    direct = linear_attention(*leaves, impl="triton", **options)
    grads = torch.autograd.grad(direct.sum(), leaves)
    with Watch():
        watched = linear_attention(*leaves, impl="triton", **options)
        again = torch.autograd.grad(watched.sum(), leaves)
    assert torch.equal(direct, watched)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    name = "triton_causal" if options else "bidirectional"
    assert {f"linattn.{name}.default", f"linattn.{name}_backward.default"} <= seen
    with torch.no_grad():
        found = linear_attention(*(x.as_subclass(Own) for x in leaves), impl="triton", **options)
    assert type(found) is Own
    assert torch.equal(found.as_subclass(Tensor), direct)


@pytest.mark.parametrize("name", ["all keys", "all keys, map", "causal", "exponential", "channel"])
def test_a_second_derivative_is_refused(name: str) -> None:
    """Rather than taken for 0, as that of a constant."""
    call, t = CALLS[name]
    leaves = {key: x.detach().requires_grad_() for key, x in t.items()}
    output = call(leaves, "triton")["output"]
    (grad,) = torch.autograd.grad(output.square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"gradients of kernels cannot be .*impl='reference'"):
        grad.sum().backward()


@pytest.mark.parametrize("name", ["all keys", "causal", "exponential", "channel", "reflection"])
def test_outputs_that_no_loss_uses_count_as_zeros(name: str) -> None:
    call, t = CALLS[name]
    for used in call(t, "triton").keys() - {"final unit"}:  # a constant

        def one(x: Tensors, impl: str, used: str = used) -> Tensors:
            return {used: call(x, impl)[used]}

        found, expected = (evaluate(one, t, impl) for impl in ("triton", "reference"))
        for key, x in expected.items():
            torch.testing.assert_close(found[key], x, rtol=1e-4, atol=1e-4)
