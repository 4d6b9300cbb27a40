"""Results lie in memory as what they belong to: what kernels write is the same wherever they write it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.bidirectional_case import take_path
from kernels.device import DEVICE
from kernels.mapped_case import Case, draw
from linattn.kernels.bidirectional import config
from linattn.kernels.bidirectional.attend import attend_all
from linattn.kernels.bidirectional.library import bidirectional
from linattn.kernels.common.layout import like_tokens
from linattn.kernels.common.support import interpreted
from linattn.kernels.reflection.library import reflected
from linattn.layers import Attention
from linattn.ops.reflection.api import reflect_heads
from linattn.testing.poison import poisoned_allocations

# Of q, k and v: which are by token. Each result follows its own.
LAYOUTS = [(True, True, False), (False, True, True)]
SIZES = {"B": 2, "H": 2, "H_kv": 2, "Tq": 19, "Tk": 35}
# The map, its options, the path: one for each kernel that writes a result.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "short": ("identity", {"H_kv": 1}, "short"),
    "long": ("identity", {"H_kv": 1}, "long"),
    "wide": ("identity", {"H_kv": 1}, "wide"),
    "mapped": ("norm_power", {"tokens": True, "constant": True}, "short"),
    "mapped, long": ("norm_power", {"mask": True}, "long"),
    "flows": ("split_power", {"flows": 2, "V": 32, "H_kv": 1}, "short"),
    "flows, long": ("split_power", {"flows": 2, "V": 32}, "long"),
    "packed": ("relu", {"B": 1, "cu": (0, 5, 5, 37)}, "long"),
    "joined": ("split_power", {"flows": 2, "V": 64, "H_kv": 1, "dtype": torch.bfloat16}, "short"),
    "joined, long": ("split_power", {"flows": 2, "V": 64, "dtype": torch.bfloat16}, "long"),
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
    if interpreted():
        assert torch.equal(x, y), what
    else:
        assert (x - y).abs().max() <= 32 * torch.finfo(x.dtype).eps * y.abs().max(), what


def attention(case: Case, layout: tuple[bool, bool, bool]) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    given = zip(case[2:5], layout, strict=True)
    leaves = [(by_token(x) if lies else x.contiguous()).detach().requires_grad_() for x, lies in given]
    maps = None if case.name == "identity" else case.twins()
    options = {"key_mask": case.key_mask, "cu_seqlens": case.cu_seqlens, "out_dtype": case.v.dtype}
    output, _ = attend_all(*leaves, maps=maps, normalizer="sum", eps=1e-6, **options)
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    return [output, *torch.autograd.grad(output, leaves, by_token(seed) if layout[0] else seed)]


@pytest.mark.parametrize("name", CASES)
def test_attention_in_every_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    map_name, options, path = CASES[name]
    take_path(path, monkeypatch)
    if name == "joined, long":
        monkeypatch.setattr(config, "WIDE", dict.fromkeys(config.WIDE, 64 * 64))
    case = draw(map_name, **SIZES | options)
    contiguous = attention(case, (False, False, False))
    assert all(x.is_contiguous() and x.isfinite().all() for x in contiguous)
    for layout in LAYOUTS:
        with poisoned_allocations():
            found = attention(case, layout)
        for result, x, y, lies in zip(("o", "q", "k", "v"), found, contiguous, (layout[0], *layout), strict=True):
            assert x.stride() == expected_strides(x, lies), (result, layout)
            assert_same(x, y, (result, layout))


@pytest.mark.parametrize("R", [0, 2])
def test_reflections_in_every_layout(R: int) -> None:
    noise = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, T, 6, generator=noise).to(DEVICE) for T in (21, 37))
    normals = torch.randn(R, 3, 1, 6, generator=noise).to(DEVICE) if R else None

    def results(layout: tuple[bool, ...]) -> list[Tensor]:
        leaves = [by_token(x) if lies else x.clone() for x, lies in zip((q, k), layout, strict=True)]
        leaves = [x.requires_grad_() for x in leaves]
        out = reflect_heads(*leaves, normals, variance=True, impl="triton")
        loss = out.variance.square().sum()
        if R:  # else q and k themselves
            loss = loss + (out.q * q).sum() + (out.k * k).sum()
        return [out.q, out.k, *torch.autograd.grad(loss, leaves)]

    contiguous = results((False, False))
    for layout in ((True, False), (False, True)):
        with poisoned_allocations():
            found = results(layout)
        for n, (x, y, lies) in enumerate(zip(found, contiguous, (*layout, *layout), strict=True)):
            if R or n > 1:
                assert x.stride() == expected_strides(x, lies), (n, layout)
            assert_same(x, y, (n, layout))


def test_memory_for_results() -> None:
    x = torch.empty(2, 5, 3, 4).transpose(1, 2)  # (B, H, T, W) by token
    assert like_tokens(x, 7).stride() == (105, 7, 21, 1)
    assert like_tokens(x, 7, torch.float16, (2,)).stride() == (210, 105, 7, 21, 1)
    assert like_tokens(x.contiguous(), 7).is_contiguous()
    assert like_tokens(x.new_zeros(()).expand(x.shape), 7).is_contiguous()
    one_head, one_token = (x[:, :1], x[:, :, :1])
    for part in (one_head, one_token):
        assert like_tokens(part, 7).is_contiguous()
        assert like_tokens(part, 7).shape == (*part.shape[:3], 7)


def test_outputs_may_be_changed_in_place() -> None:
    """They are no views, which autograd would protect."""
    leaves = [by_token(torch.rand(1, 2, 5, 16, device=DEVICE)).requires_grad_() for _ in range(3)]
    output, _ = attend_all(*leaves, normalizer=None, eps=0.0, out_dtype=torch.float32)
    expected = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    for x, y in zip(torch.autograd.grad(output.mul_(2).sum(), leaves), expected, strict=True):
        assert torch.equal(x, 2 * y)


def operators() -> list[tuple[Any, tuple[Any, ...]]]:
    q, k, v = (by_token(torch.rand(2, 2, T, 16, device=DEVICE)).requires_grad_() for T in (9, 12, 12))
    normals = torch.randn(1, 32, device=DEVICE).requires_grad_()
    options = None, None, None, 1, 1e-6, torch.float32, False, *[None] * 6, -1, -1, 1, 1
    return [(bidirectional, (q, k, v, *options)), (reflected, (q, k, normals, None, True, False))]


@pytest.mark.parametrize("which", [0, 1])
def test_operators_say_where_results_lie(which: int) -> None:
    """Compilers believe what is said of results that have not been made yet."""
    operator, args = operators()[which]
    torch.library.opcheck(operator, args)

    def strides(args: tuple[Any, ...]) -> list[tuple[int, ...]]:
        found = [x for x in operator(*args) if x.requires_grad]
        leaves = [x for x in args if isinstance(x, Tensor)]
        return [x.stride() for x in (*found, *torch.autograd.grad(found, leaves, found))]

    with FakeTensorMode() as mode:
        told = strides(tuple(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args))
    assert told == strides(args)
    assert expected_strides(args[0], True) in told


class Copies(TorchDispatchMode):
    """Counts what copies numbers, as many as the tokens have or more."""

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
