"""Results lie in memory as what they belong to, and are the same numbers in every order."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.budget import BF16, FP16, Tensors, evaluate
from kernels.case import Case, forced
from kernels.device import DEVICE
from linattn import linear_attention
from linattn.kernels.common import layout
from linattn.layers import Attention
from linattn.ops.reflection.api import reflect_heads
from linattn.testing.poison import poisoned_allocations

# One for each kernel that writes a result.
CASES: dict[str, dict[str, Any]] = {
    "short": {},
    "long": {"path": "long"},
    "wide": {"path": "wide"},
    "map": {"map": "nala_masked", "H_kv": 2},
    "map, long": {"map": "nala", "H_kv": 2, "path": "long"},
    "flows": {"map": "pola", "V": 32},
    "flows, long": {"map": "pola", "V": 32, "H_kv": 2, "path": "long"},
    "packed": {"map": "relu", "B": 1, "cu": (0, 5, 5, 37), "path": "long"},
    "joined": {"map": "pola", "V": 64, "dtype": BF16},
    "joined, long": {"map": "pola", "V": 64, "H_kv": 2, "dtype": BF16, "path": "long"},
    "turned": {"map": "pola_plus", "H_kv": 2, "plane": (4, 5)},
    "causal": {"causal": True, "decay": "token", "H_kv": 2, "V": 32, "T": 70, "segments": 2},
    "causal, padded": {"causal": True, "decay": "token", "V": 20, "dtype": BF16, "T": 70},
    "causal, state": {"causal": True, "decay": "token", "norm": None, "H_kv": 2, "dtype": BF16, "final": True},
    "causal, packed": {"causal": True, "decay": "token", "B": 1, "norm": "abs_max_one", "cu": (0, 3, 3, 45, 70)},
    "both ways": {"decay": "token", "H_kv": 2, "dtype": BF16, "T": 70, "segments": 2},
    "both ways in sweeps": {"decay": "token", "K": 24, "dtype": FP16, "T": 70},
    "exponential": {"gate": 1.0, "decay": "token", "norm": None, "H_kv": 2, "V": 32, "dtype": BF16, "T": 70},
    "exponential, padded": {"gate": 1.0, "decay": "token", "norm": None, "K": 20, "dtype": FP16, "T": 70},
}


def by_token(x: Tensor) -> Tensor:
    """x (B, H, T, D) in memory as a projection to more than x leaves it."""
    tokens = x.transpose(1, 2)
    return torch.cat([tokens, tokens], 2)[:, :, : x.shape[1]].transpose(1, 2)


def expected_strides(x: Tensor, lies_by_token: bool) -> tuple[int, ...]:
    _, H, T, W = x.shape
    return (T * H * W, W, H * W, 1) if lies_by_token else (H * T * W, T * W, W, 1)


def assert_same(x: Tensor, y: Tensor, what: object) -> None:
    """Bit for bit in the interpreter; a compiler may spread tiles in another way, and sum in another order."""
    if DEVICE == "cpu":
        assert torch.equal(x, y), what
    else:
        assert (x - y).abs().max() <= 32 * torch.finfo(x.dtype).eps * y.abs().max(), what


@pytest.mark.parametrize("name", CASES)
def test_attention_in_every_order(name: str) -> None:
    """Of q, k and v each for itself: some come from a projection, others were made contiguous by something before."""
    case = Case(**{"B": 2, "H": 2, "T": 19, "V": 16} | CASES[name])
    whole = {}
    for orders in ((False, False, False), (True, True, True), (True, True, False), (False, True, True)):
        t = case.t | {x: by_token(case.t[x]) for x, turned in zip("qkv", orders, strict=True) if turned}
        with forced(case), poisoned_allocations():
            found = evaluate(case, t, "triton", case.dtype)
        whole = whole or found
        for key, lies in zip(("output", "d q", "d k", "d v"), (orders[0], *orders), strict=True):
            if lies and found[key].shape[1] == 1:
                assert found[key].transpose(1, 2).is_contiguous()
            else:
                assert found[key].stride() == expected_strides(found[key], lies), (key, orders)
        for key, x in found.items():
            assert_same(x, whole[key], (key, orders))


@pytest.mark.parametrize("R", [0, 2])
def test_reflections_in_every_order(R: int) -> None:
    noise = torch.Generator().manual_seed(0)
    given = {name: torch.randn(2, 3, T, 6, generator=noise).to(DEVICE) for name, T in (("q", 21), ("k", 37))}
    normals = torch.randn(R, 3, 1, 6, generator=noise).to(DEVICE) if R else None

    def call(t: Tensors, impl: str) -> Tensors:
        out = reflect_heads(t["q"], t["k"], normals, variance=True, impl=impl)
        return {"q": out.q, "k": out.k, "variance": out.variance} if R else {"variance": out.variance}

    whole: Tensors = {}
    for orders in product((False, True), repeat=2):
        t = {name: by_token(x) if lies else x for (name, x), lies in zip(given.items(), orders, strict=True)}
        with poisoned_allocations():
            found = evaluate(call, t, "triton")
        whole = whole or found
        for key, lies in (("q", orders[0]), ("k", orders[1]), ("d q", orders[0]), ("d k", orders[1])):
            if key in found:
                assert found[key].stride() == expected_strides(found[key], lies), (key, orders)
        for key, x in found.items():
            assert_same(x, whole[key], (key, orders))


def test_new_memory_lies_as_tokens_do() -> None:
    x = torch.empty(2, 5, 3, 4).transpose(1, 2)  # (B, H, T, W) by token
    assert layout.like_tokens(x, 7).stride() == (105, 7, 21, 1)
    assert layout.like_tokens(x, 7, FP16, (2,)).stride() == (210, 105, 7, 21, 1)
    assert layout.like_tokens(x, 7, BF16, heads=6).stride() == (210, 7, 42, 1)
    assert layout.like_tokens(x.contiguous(), 7).is_contiguous()
    assert layout.like_tokens(x.new_zeros(()).expand(x.shape), 7).is_contiguous()
    one = torch.empty(3, 2, 5, 3, 4)[0].transpose(1, 2)  # a part of one projection for all three
    assert layout.like_tokens(one, 4).transpose(1, 2).is_contiguous()
    for part in (x[:, :1], x[:, :, :1]):
        assert layout.like_tokens(part, 7).is_contiguous()
        assert layout.like_tokens(part, 7).shape == (*part.shape[:3], 7)
    assert layout.side_by_side(x) == 3
    assert layout.side_by_side(x.contiguous()) == layout.side_by_side(torch.empty(2, 5, 1, 4).transpose(1, 2)) == 1


def test_outputs_may_be_changed_in_place() -> None:
    """They are no views, which autograd would protect."""
    leaves = [by_token(torch.rand(1, 2, 5, 16, device=DEVICE)).requires_grad_() for _ in range(3)]
    output = linear_attention(*leaves, normalizer=None, impl="triton")
    expected = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    for x, y in zip(torch.autograd.grad(output.mul_(2).sum(), leaves), expected, strict=True):
        assert torch.equal(x, 2 * y)


class Copies(TorchDispatchMode):
    """What copies numbers, as many as the tokens have or more."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func._schema.name in ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::cat"):
            self.found += [func._schema.name] if out.numel() >= self.size else []
        return out


@pytest.mark.parametrize("mechanism", ["relu", "mirror", "nala", "pola"])
def test_a_layer_copies_nothing_but_the_three_gradients_into_one(mechanism: str) -> None:
    torch.manual_seed(0)
    layer = Attention(32, 2, mechanism, impl="triton").to(DEVICE)
    x = torch.randn(2, 12, 32, device=DEVICE, requires_grad=True)
    heads, tokens = [], []
    layer.mechanism.register_forward_hook(lambda module, args, output: heads.append(output))
    layer.proj.register_forward_pre_hook(lambda module, args: tokens.append(args[0]))
    with Copies(x.numel()) as copies:
        layer(x).sum().backward()
    assert tokens[0].data_ptr() == heads[0].data_ptr()
    assert copies.found == ["aten::cat"]
