"""Layers with rotary positions: kernels of turned features against the same layer in plain PyTorch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.budget import assert_within, moved
from kernels.device import DEVICE
from linattn.kernels import linear as triton_linear
from linattn.layers import Attention, rotary

PLANE = (3, 5)
NAMES = ["nala", "pola_plus", "rala", "mirror", "relu", "elu"]


def layer(name: str, impl: str, **options: Any) -> Attention:
    torch.manual_seed(0)
    built = Attention(32, 2, name, impl=impl, num_prefix_tokens=1, **options)
    with torch.no_grad():
        for parameter in built.mechanism.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return built.to(DEVICE)


def run(attention: Attention, x: Tensor, key_mask: Tensor | None) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    out = attention(x, spatial_shape=PLANE, key_mask=key_mask)
    if key_mask is not None:
        out = out * key_mask.unsqueeze(-1)  # padding has no output
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    leaves = {"x": x} | dict(attention.named_parameters())
    grads = torch.autograd.grad(out, list(leaves.values()), seed)
    return {"output": out.detach()} | {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("rotary", ["blocks", "features"])
@pytest.mark.parametrize("name", NAMES)
def test_mechanisms(name: str, rotary: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, right = [], triton_linear.attend_turned
    monkeypatch.setattr(triton_linear, "attend_turned", lambda *args: (calls.append(args), right(*args))[1])
    options: dict[str, Any] = {"rotary": rotary}
    if name != "mirror":  # it reflects across heads
        options["num_kv_heads"] = 1
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    key_mask = None
    if masked:
        key_mask = torch.ones(2, 16, dtype=torch.bool, device=DEVICE)
        key_mask[0, 11:] = False
    found = run(layer(name, "triton", **options), x, key_mask)
    assert len(calls) == 1
    plain = layer(name, "chunked", **options)
    exact = copy.deepcopy(plain).double()
    others = [run(plain, x, key_mask), *(run(exact, moved(x, seed), key_mask) for seed in (3, 4))]
    assert_within(found, run(exact, x.double(), key_mask), *others)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["nala", "pola_plus", "mirror"])
def test_compiled_as_one_graph(name: str) -> None:
    """The same numbers, with tables that are made inside the graph."""
    attention, x = layer(name, "triton", rotary="blocks"), torch.randn(2, 16, 32).to(DEVICE)
    eager = run(attention, x, None)
    torch._dynamo.reset()
    rotary._kept.clear()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    out = compiled(x.requires_grad_(), spatial_shape=PLANE)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    (gradient,) = torch.autograd.grad(out, x, seed)
    assert not rotary._kept
    torch.testing.assert_close(out.detach(), eager["output"], rtol=0, atol=0)
    torch.testing.assert_close(gradient, eager["d x"], rtol=0, atol=0)
