"""Reflections by kernels against plain PyTorch in fp64: values, variances and every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.budget import assert_within, moved
from kernels.device import DEVICE
from linattn import create_mechanism
from linattn.kernels.reflection import library
from linattn.kernels.reflection.library import reflect_directly as directly
from linattn.kernels.reflection.library import reflected, reflected_backward
from linattn.kernels.reflection.pairs_library import pair_table, pair_table_backward
from linattn.ops.explain import explain
from linattn.ops.reflection.api import pair_matrices, reflect_heads
from linattn.ops.reflection.types import Modulation
from linattn.testing.poison import poisoned_allocations

Tensors = dict[str, Tensor]
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


def evaluate(t: Tensors, impl: str, dtype: torch.dtype | None, mask: bool = False, **options: Any) -> Tensors:
    """Results and gradients; ``dtype``: of the inputs, None: as they are."""
    leaves = {name: (x if dtype is None else x.to(dtype)).detach().requires_grad_() for name, x in t.items()}
    key_mask = mask_for(t) if mask else None
    q, k = leaves["q"], leaves["k"]
    out = reflect_heads(q, k, leaves.get("normals"), key_mask=key_mask, impl=impl, **options)
    found = {name: x for name, x in zip(("yq", "yk", "variance"), out, strict=True) if x is not None}
    loss, noise = q.new_zeros((), dtype=torch.float64), torch.Generator().manual_seed(7)
    for name, x in found.items():
        # In 16 bits an output and its gradient are rounded; the loss itself is not.
        weight = torch.randn(x.shape, generator=noise, dtype=torch.float64).to(t["q"].dtype).to(DEVICE)
        loss = loss + (x.double() * weight.double()).sum() * (30.0 if name == "variance" else 1.0)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {n: x.detach() for n, x in found.items()} | dict(zip((f"d {n}" for n in leaves), gradients, strict=True))


def compare(t: Tensors, **options: Any) -> None:
    exact, plain = evaluate(t, "reference", torch.float64, **options), evaluate(t, "reference", None, **options)
    with poisoned_allocations():
        found = evaluate(t, "triton", None, **options)
    assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in plain.items()}
    assert_within(found, exact, plain)


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
    exact, found = evaluate(t, "reference", torch.float64, variance=True), evaluate(t, "triton", None, variance=True)
    error = (found["variance"].double() - exact["variance"]).abs().max()
    assert error <= 4 * torch.finfo(torch.float32).eps * far * exact["variance"].max().sqrt()


def test_padding_may_hold_anything() -> None:
    t = draw(T=12)
    mask, options = mask_for(t), {"variance": True, "mask": True}
    clean = evaluate(t, "triton", None, **options)
    for name in ("q", "k"):
        t[name] = t[name].masked_fill(~mask[:, None, :, None], torch.nan)
    torch.testing.assert_close(evaluate(t, "triton", None, **options)["variance"], clean["variance"], rtol=0, atol=0)


def test_a_row_without_real_tokens() -> None:
    t = draw(T=9)
    nothing = torch.zeros(2, 9, dtype=torch.bool, device=DEVICE)
    assert not reflect_heads(**t, variance=True, key_mask=nothing, impl="triton").variance.any()


def test_a_normal_of_zero_reflects_nothing() -> None:
    t = draw(T=9)
    t["normals"] = torch.zeros_like(t["normals"])
    compare(t, variance=True)
    torch.testing.assert_close(reflect_heads(**t, impl="triton").q, t["q"], rtol=0, atol=0)


def draw_pairs(B: int, R: int, H: int, D: int) -> tuple[Tensor, Tensor, Modulation]:
    noise = torch.Generator().manual_seed(B + R + H + D)
    variance = torch.randn(B, H, 1, D // 2, generator=noise).exp().to(DEVICE)
    angles = 3 * torch.randn(R, H, D // 2, generator=noise).to(DEVICE)
    amplitude, gain, bias = torch.randn(3, H, D // 2, generator=noise).to(DEVICE).unbind()
    return variance, angles, Modulation(amplitude, gain, bias)


def evaluate_pairs(tensors: list[Tensor], impl: str, dtype: torch.dtype) -> Tensors:
    leaves = [x.to(dtype).detach().requires_grad_() for x in tensors]
    if len(leaves) == 1:
        out = pair_matrices(leaves[0], impl=impl)
    else:
        out = pair_matrices(leaves[1], leaves[0], Modulation(*leaves[2:]), impl=impl)
    noise = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=noise).to(x)).sum() for x in out)
    gradients = torch.autograd.grad(loss, leaves)
    return {"own": out[0].detach(), "other": out[1].detach()} | {f"d {i}": g for i, g in enumerate(gradients)}


@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize("R", [1, 2])
def test_pairs(R: int, modulated: bool) -> None:
    """More rows and pairs than a program has; amplitudes near 0, from where training starts, keep their digits."""
    variance, angles, modulation = draw_pairs(11, R, 5, 28)
    tiny = modulation._replace(amplitude=1e-4 * modulation.amplitude)
    for own in [modulation, tiny] if modulated else [None]:
        tensors = [angles] if own is None else [variance, angles, *own]
        exact, plain = (evaluate_pairs(tensors, "reference", d) for d in (torch.float64, torch.float32))
        with poisoned_allocations():
            found = evaluate_pairs(tensors, "triton", torch.float32)
        assert_within(found, exact, plain)


def test_operators_keep_the_contract_of_torch() -> None:
    t = {name: x.requires_grad_() for name, x in draw(R=2, T=5, D=4).items()}
    q, k, normals = t["q"].detach(), t["k"].detach(), t["normals"].flatten(1).detach()
    mask = mask_for(t)
    torch.library.opcheck(reflected, (t["q"], t["k"], t["normals"].flatten(1), mask, True, False))
    _, _, variances, center, inverse = reflected(q, k, normals, mask, True, False)
    back = (q, k, variances, q, k, normals, mask, center, inverse, True)
    torch.library.opcheck(reflected_backward, back)
    variance, angles, modulation = draw_pairs(3, 2, 2, 4)
    inputs = tuple(x.requires_grad_() for x in (variance.squeeze(2), angles, *modulation))
    torch.library.opcheck(pair_table, inputs)
    table = pair_table(*inputs).detach()
    torch.library.opcheck(pair_table_backward, (table, *(x.detach() for x in inputs)))
    torch.library.opcheck(pair_table_backward, (table[:1], None, angles.detach(), None, None, None))


@pytest.mark.parametrize("used", ["yq", "variance"])
def test_what_nobody_used_has_no_gradient(used: str) -> None:
    """Neither way: through the operator as through its shortcut."""
    t = {name: x.requires_grad_() for name, x in draw(T=7).items()}
    leaves = list(t.values())
    inputs = t["q"], t["k"], t["normals"].flatten(1), None, True, False
    at = 0 if used == "yq" else 2
    by_name, short = (torch.autograd.grad(run(*inputs)[at].square().sum(), leaves) for run in (reflected, directly))
    plain = reflect_heads(**t, variance=True, impl="reference")
    expected = torch.autograd.grad(plain[at].square().sum(), leaves, allow_unused=True)
    for one, other, true in zip(by_name, short, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, torch.zeros_like(one) if true is None else true, rtol=1e-5, atol=1e-5)


def test_a_name_is_never_replaced() -> None:
    t = draw(T=5)
    for impl in ("reference", "recurrent", "chunked", "triton"):
        assert explain(**t, op=reflect_heads, impl=impl, variance=True).impl == impl
    assert explain(**t, op=reflect_heads).impl == ("triton" if DEVICE == "cuda" else "chunked")
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


@pytest.mark.slow
def test_the_mechanism_compiles_under_autocast() -> None:
    """In one graph, q and k in 16 bits beside parameters in fp32."""
    torch.manual_seed(0)
    mechanism = create_mechanism("mirror", num_heads=2, head_dim=16, impl="triton").to(DEVICE)
    torch.nn.init.normal_(mechanism.amplitude)
    inputs = torch.randn(3, 1, 2, 20, 16, device=DEVICE).bfloat16().unbind()

    def evaluate(module: Callable[..., Tensor]) -> list[Tensor]:
        with torch.autocast(DEVICE, torch.bfloat16):
            out = module(*inputs)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), list(mechanism.parameters()))]

    compiled = evaluate(torch.compile(mechanism, fullgraph=True, backend="aot_eager"))
    for found, expected in zip(compiled, evaluate(mechanism), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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
