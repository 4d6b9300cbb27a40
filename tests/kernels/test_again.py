"""Calls again, with other layouts and dtypes, from threads and in CUDA graphs: the values are right."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.budget import BF16, FP16, Tensors
from kernels.case import Case
from kernels.device import DEVICE
from linattn import (
    create_mechanism,
    exponential_attention_step,
    linear_attention_step,
    short_convolution_step,
)
from linattn.ops.convolution.call import ConvolutionState
from linattn.ops.exponential.call import ExponentialState
from linattn.ops.maps import EluPlusOne
from linattn.ops.shared.types import LinearState
from linattn.testing.poison import poisoned_allocations

gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
KINDS: dict[str, dict[str, Any]] = {
    "all keys": {}, "map": {"map": "elu"}, "causal": {"causal": True}, "both ways": {"decay": "token"},
    "decay": {"causal": True, "decay": "token", "start": True}, "channel": {"causal": True, "decay": "channel"},
    "exponential": {"gate": 0.5, "decay": "token", "norm": None},
}  # fmt: skip


def calls(kind: str, **sizes: int) -> list[Case]:
    """Neighbours differ in one respect that may ask for another kernel, or for other memory."""
    known = {"T": 40 if DEVICE == "cuda" else 20, "H_kv": 2, **KINDS[kind], **sizes}
    changes = (
        {"layout": "tokens"},
        {"layout": "columns"},
        {"dtype": BF16},
        {"dtype": FP16},
        {"T": 21},
        {"H": 4},
        {"V": 32},
    )
    return [Case(**known | change) for change in ({}, {"seed": 1}, *changes, {"norm": None}, {})]


def shifted(x: Tensor, by: int) -> Tensor:
    """The same numbers, at another place of memory."""
    room = x.new_zeros(x.numel() + by)
    return room[by:].view(x.shape).copy_(x)


@pytest.mark.parametrize("kind", KINDS)
def test_other_calls_come_between(kind: str) -> None:
    """The first time each is right; later, wherever its inputs lie and whoever called before, it has the same bits."""
    known = [(case, case.check()) for case in calls(kind)]
    for by in (0, 1, 8) if DEVICE == "cuda" else (1,):  # the interpreter remembers nothing
        for case, expected in known:
            again = replace(case)
            if case.layout == "dense":
                vars(again)["t"] = {name: shifted(x, by) for name, x in case.t.items()}
            for name, x in again.evaluate().items():
                rounding = 0 if DEVICE == "cpu" else 4 * torch.finfo(x.dtype).eps * expected[name].abs().max().item()
                torch.testing.assert_close(x, expected[name], rtol=0, atol=rounding)


@pytest.mark.parametrize("causal", [False, True])
def test_inputs_may_share_memory(causal: bool) -> None:
    """One tensor three times, then three of the same looks, and parts of one."""
    case, other = (Case(causal=causal, T=20, H_kv=2, norm=None, seed=seed) for seed in (0, 1))
    x, y = case.t["q"], other.t["q"]
    joined = torch.stack([x, y, x + y])
    for q, k, v in ((x, x, x), (x, y, x), (y, x, x), joined.unbind(), (joined[1], joined[0], joined[2]), (y, y, y)):
        t = {"q": q, "k": k, "v": v}
        torch.testing.assert_close(case(t, "triton")["output"], case(t, "reference")["output"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "options"), [
    ("relu", {"causal": False}), ("nala", {"causal": False}), ("retention", {}), ("gated", {"gate": "head"}),
    ("gated", {"gate": "channel"}), ("mlstm", {}),
], ids=str)  # fmt: skip
def test_mechanisms_called_again_on_memory_that_is_nan(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    mechanism = create_mechanism(name, num_heads=2, head_dim=16, impl="triton", **{"causal": True} | options).to(DEVICE)
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, 130, 16).to(DEVICE).unbind()]
    x = torch.randn(1, 130, 32).to(DEVICE) if mechanism.info.uses_input else None

    def call() -> list[Tensor]:
        out = mechanism(*leaves, x=x)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    with poisoned_allocations():
        first, *others = (call() for _ in range(3))
    assert all(x.isfinite().all() for x in first)
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_threads_have_calls_of_their_own(kind: str) -> None:
    """On streams of their own, too."""
    known = [(case, case.evaluate()) for case in calls(kind, T=600, K=64, V=64)]
    torch.cuda.synchronize()

    def again(one: tuple[Case, Tensors]) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = one[0].evaluate()
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(found[name], x) for name, x in one[1].items())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(again, known * 4))


def _linear(decay: str | None) -> tuple[Callable[[Any], Any], Any]:
    case = Case(T=1, B=8, H=8, H_kv=4, K=64, V=64, causal=True, decay=decay, dtype=BF16, start=True)
    q, k, v = (case.t[name].squeeze(2) for name in "qkv")
    options = {"log_decay": case.t["log_decay"].squeeze(2) if decay else None, "feature_map": EluPlusOne()}
    return lambda state: linear_attention_step(q, k, v, state, **options), LinearState(case.t["kv"], case.t["z"])


def _exponential() -> tuple[Callable[[Any], Any], Any]:
    case = Case(T=1, B=2, K=64, V=64, gate=1.0, decay="token", dtype=BF16, start=True)
    q, k, v = (case.t[name].squeeze(2) for name in "qkv")
    gates = {name: case.t[name].squeeze(2) for name in ("log_input", "log_decay")}
    start = ExponentialState(case.t["kv"], case.t["z"], case.t["unit"])
    return lambda state: exponential_attention_step(q, k, v, state, **gates), start


def _convolution() -> tuple[Callable[[Any], Any], Any]:
    x, weight, bias, start = (torch.randn(shape, device=DEVICE) for shape in ((4, 300), (300, 4), (300,), (4, 3, 300)))
    return lambda state: short_convolution_step(x, weight, bias, state, activation="silu"), ConvolutionState(start)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("made", [
    lambda: _linear(None), lambda: _linear("token"), lambda: _linear("channel"), _exponential, _convolution,
])  # fmt: skip
@torch.no_grad()
def test_a_graph_replays_steps(made: Callable[[], tuple[Callable[[Any], Any], Any]]) -> None:
    """No wait for the device and no look at values on the way: a decoding loop is captured once."""
    step, start = made()
    held = type(start)(*(x.clone() for x in start))
    step(held)  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, state = step(held)
        for old, new in zip(held, state, strict=True):
            old.copy_(new)
    for _ in range(4):
        graph.replay()
        right, start = step(start)
    torch.cuda.synchronize()
    assert torch.equal(captured, right)
    assert all(torch.equal(a, b) for a, b in zip(held, start, strict=True))
