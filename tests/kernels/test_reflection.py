"""Reflections by kernels against plain PyTorch in fp64: values, variances and every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import budget
from kernels.budget import Call, Tensors, assert_within, moved
from kernels.device import DEVICE
from linattn import create_mechanism
from linattn.kernels.reflection import library
from linattn.ops.reflection.api import pair_matrices, reflect_heads
from linattn.ops.reflection.types import Modulation

# Sizes, then options. Each differs from the others in what could go wrong.
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({}, {"variance": True}),
    "two": ({"R": 2, "H": 3, "D": 6}, {"variance": True}),
    "masked": ({"R": 2}, {"variance": True, "mask": True}),
    "other length": ({"Tk": 21}, {"variance": True, "mask": True}),
    "no variance": ({"R": 2}, {"wide": True}),
    "grouped": ({"R": 0, "H": 4, "H_kv": 2}, {"variance": True, "mask": True}),
}


def draw(
    R: int = 1, H: int = 2, H_kv: int = 0, T: int = 37, Tk: int = 0, D: int = 8, B: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Tensors:  # fmt: skip
    """q and k as a layer has them: views of one tensor (B, T, 2, heads, D) where they are equally many."""
    noise = torch.Generator().manual_seed(R + H + T + D)
    H_kv, Tk = H_kv or H, Tk or T
    joined = torch.randn(B, T, H + H_kv, D, generator=noise) * 1.5 + 0.7
    q, k = joined.to(dtype).transpose(1, 2).split([H, H_kv], dim=1)
    inputs = {"q": q, "k": k[:, :, :Tk]}
    if R:
        inputs["normals"] = torch.randn(R, H, 1, D, generator=noise)
    return {name: x.to(DEVICE) for name, x in inputs.items()}


def mask_for(t: Tensors) -> Tensor:
    mask = torch.arange(t["k"].shape[2], device=DEVICE).expand(t["k"].shape[0], -1) % 5 != 1
    mask[0, 11:] = False
    return mask


def call_of(mask: Tensor | None = None, **options: Any) -> Call:
    def call(t: Tensors, impl: str) -> Tensors:
        out = reflect_heads(t["q"], t["k"], t.get("normals"), key_mask=mask, impl=impl, **options)
        found = {name: x for name, x in zip(("yq", "yk", "variance"), out, strict=True) if x is not None}
        # As much of a loss as the others, of which there are more.
        return found | ({"variance": 30.0 * found["variance"]} if "variance" in found else {})

    return call


def compare(t: Tensors, mask: bool = False, **options: Any) -> None:
    budget.check(call_of(mask_for(t) if mask else None, **options), t, dtype=t["q"].dtype, form="reference")


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few numbers a thread a sequence has several segments of several tiles, the last not full."""
    monkeypatch.setattr(library, "PER_THREAD", 1)
    monkeypatch.setattr(library, "PER_THREAD_BACKWARD", 1)
    monkeypatch.setattr(library, "ENOUGH", 4)
    monkeypatch.setattr(library, "LONGEST", 2)
    sizes, options = CASES[name]
    t = draw(**sizes)
    walk = library.walk_for(t["q"], t["k"], 1)
    assert walk.of_q > t["q"].shape[0]
    assert walk.span > walk.BT
    assert t["q"].shape[2] % walk.BT
    compare(t, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_types(dtype: torch.dtype) -> None:
    compare(draw(R=2, T=20, D=16, dtype=dtype), variance=True)


def test_a_mean_far_from_zero() -> None:
    """A difference of mean squares would lose the variance altogether; here only the means of tiles are rounded."""
    far = 1e3
    t = {name: x + far for name, x in draw(R=0, T=40).items()}
    exact = reflect_heads(t["q"].double(), t["k"].double(), None, variance=True, impl="reference").variance
    found = reflect_heads(**t, normals=None, variance=True, impl="triton").variance
    assert (found - exact).abs().max() <= 4 * torch.finfo(torch.float32).eps * far * exact.max().sqrt()


def test_padding_may_hold_anything() -> None:
    t = draw(T=12)
    mask = mask_for(t)
    hidden = {name: t[name].masked_fill(~mask[:, None, :, None], torch.nan) for name in ("q", "k")}
    clean, found = (reflect_heads(**x, variance=True, key_mask=mask, impl="triton").variance for x in (t, t | hidden))
    assert torch.equal(found, clean)


def test_a_row_without_real_tokens() -> None:
    t = draw(T=9)
    nothing = torch.zeros(2, 9, dtype=torch.bool, device=DEVICE)
    assert not reflect_heads(**t, variance=True, key_mask=nothing, impl="triton").variance.any()


def test_a_normal_of_zero_reflects_nothing() -> None:
    t = draw(T=9)
    t["normals"] = torch.zeros_like(t["normals"])
    compare(t, variance=True)
    torch.testing.assert_close(reflect_heads(**t, impl="triton").q, t["q"], rtol=0, atol=0)


@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize("R", [1, 2])
def test_pairs(R: int, modulated: bool) -> None:
    """More rows and pairs than a program has; amplitudes near 0, from where training starts, keep their digits."""
    noise = torch.Generator().manual_seed(R)
    shapes = {"angles": (R, 5, 14)} | (
        {"variance": (11, 5, 1, 14), "amplitude": (5, 14), "gain": (5, 14), "bias": (5, 14)} if modulated else {}
    )
    t = {name: torch.randn(shape, generator=noise).to(DEVICE) for name, shape in shapes.items()}
    t["angles"] *= 3

    def call(t: Tensors, impl: str) -> Tensors:
        more = (t["variance"].exp(), Modulation(t["amplitude"], t["gain"], t["bias"])) if modulated else ()
        return dict(zip(("own", "other"), pair_matrices(t["angles"], *more, impl=impl), strict=True))

    for size in (1.0, 1e-4) if modulated else (1.0,):
        budget.check(call, {name: x * size if name == "amplitude" else x for name, x in t.items()}, form="reference")


def test_a_name_is_never_replaced() -> None:
    t = draw(T=5)
    double = {name: x.double() for name, x in t.items()}
    with pytest.raises(ValueError, match=r"impl='triton' cannot serve this call: kernels take float32"):
        reflect_heads(**double, impl="triton")
    with pytest.raises(ValueError, match="an empty input needs none"):
        reflect_heads(t["q"][:, :, :0], t["k"], t["normals"], impl="triton")
    with pytest.raises(ValueError, match="normals must have shape"):
        reflect_heads(t["q"], t["k"], t["normals"][:, :1])


@pytest.mark.parametrize("options", [{}, {"causal": True, "reflections": 2, "modulation": "none"}], ids=str)
def test_the_mechanism_runs_them(options: dict[str, Any]) -> None:
    """Through ``mirror``, whose parameters all learn: kernels and plain PyTorch agree within the budget."""
    torch.manual_seed(0)
    mechanism = create_mechanism("mirror", num_heads=2, head_dim=16, **options).to(DEVICE)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    q, k, v = torch.randn(3, 2, 2, 20, 16).to(DEVICE).unbind()
    mask = torch.arange(20, device=DEVICE).expand(2, -1) < 17

    def evaluate(impl: str, dtype: torch.dtype, seed: int | None = None) -> Tensors:
        """With a seed, on inputs moved by roundings: what these leave of an angle's gradient, a sum that cancels."""
        mechanism.to(dtype).impl = impl
        inputs = (x.to(dtype) if seed is None else moved(x, seed) for x in (q, k, v))
        out = mechanism(*inputs, key_mask=mask)[:, :, :17]
        names, parameters = zip(*mechanism.named_parameters(), strict=True)
        gradients = torch.autograd.grad(out.square().sum(), parameters)
        return {"output": out.detach(), **dict(zip(names, gradients, strict=True))}

    plain, found = evaluate("chunked", torch.float32), evaluate("triton", torch.float32)
    others = (evaluate("chunked", torch.float64, seed) for seed in range(4))
    assert_within(found, evaluate("chunked", torch.float64), plain, *others)


class Names(TorchDispatchMode):
    """Of this library's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen |= {func.name()} if func.namespace == "linattn" else set()
        return func(*args, **(kwargs or {}))


def test_which_of_them_the_mechanism_runs() -> None:
    """Packed sequences and tokens with angles of their own keep the reflection across heads, and PyTorch for pairs."""
    q, k, v = torch.randn(3, 1, 2, 5, 4, device=DEVICE).unbind()
    heads, pairs = "linattn::triton_reflect_heads", "linattn::triton_pair_table"
    packed = {"cu_seqlens": torch.tensor([0, 2, 5], device=DEVICE)}
    for options, more, expected in (
        ({"impl": "triton"}, {}, {heads, pairs}),
        ({"impl": "triton"}, packed, {heads}),
        ({"impl": "triton", "causal": True}, {}, {heads}),
        ({"impl": "chunked"}, {}, set()),
    ):
        mechanism = create_mechanism("mirror", num_heads=2, head_dim=4, **options).to(DEVICE)
        with Names() as names, torch.no_grad():
            mechanism(q, k, v, **more)
        assert names.seen & {heads, pairs} == expected
