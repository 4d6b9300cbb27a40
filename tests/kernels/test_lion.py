"""LION on kernels: they are handed its map, and give what the definition gives in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.budget import assert_within, moved
from kernels.device import DEVICE
from linattn import create_mechanism, explain
from linattn.ops.maps import EluPlusOne, UnitSilu

T = 12
CASES: dict[str, dict[str, Any]] = {
    "none": {"decay": "none"},
    "fixed": {"decay": "fixed"},
    "selective": {"decay": "selective"},
    "snake": {"decay": "selective", "order": "snake"},
    "snake, no normaliser": {"decay": "fixed", "order": "snake", "normalizer": None},
    "causal": {"decay": "selective", "causal": True},
    "causal, by channel": {"decay": "fixed", "decay_per": "channel", "causal": True},
}


def evaluate(case: str, features: str, inputs: list[Tensor], impl: str) -> dict[str, Tensor]:
    """The output, and the gradients of q, k and v."""
    torch.manual_seed(0)
    mechanism = create_mechanism("lion", num_heads=2, head_dim=20, features=features, impl=impl, **CASES[case])
    mechanism.to(inputs[0])
    q, k, v, x = (tensor.detach().requires_grad_() for tensor in inputs)
    out = mechanism(q, k, v, x=x, spatial_shape=(3, 4))
    grads = torch.autograd.grad(out.double().square().sum(), (q, k, v))
    return {"output": out.detach()} | {f"d {name}": grad for name, grad in zip("qkv", grads, strict=True)}


@pytest.mark.parametrize("features", ["silu", "elu"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_make_its_features(case: str, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 2, T, 20), (2, 2, T, 20), (2, 2, T, 20), (2, T, 40)
    inputs = [torch.randn(shape, generator=draw).to(DEVICE) for shape in shapes]
    exact, *plain = (
        evaluate(case, features, own, "reference")
        for own in ([x.double() for x in inputs], inputs, [moved(x) for x in inputs])
    )

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("features were made in PyTorch")

    for own in (UnitSilu, EluPlusOne):
        monkeypatch.setattr(own, "__call__", refuse)
    assert_within(evaluate(case, features, inputs, "triton"), exact, *plain)


def test_what_no_kernel_serves_is_explained() -> None:
    """A decay per channel both ways; the map changes nothing about it."""
    q = torch.randn(1, 2, T, 16, device=DEVICE)
    options = {"log_decay": -torch.rand(1, 2, T, 16, device=DEVICE), "feature_map": UnitSilu(), "impl": "triton"}
    assert explain(q, q, q, causal=True, **options).impl == "triton"
    with pytest.raises(ValueError, match="a decay per channel has a causal kernel only"):
        explain(q, q, q, **options)


@pytest.mark.parametrize("decay", ["none", "selective"])
def test_decoding_goes_on_from_the_state_of_a_kernel(decay: str) -> None:
    mechanism = create_mechanism("lion", num_heads=2, head_dim=20, causal=True, impl="triton", decay=decay).to(DEVICE)
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, T, 20, generator=draw).to(DEVICE).unbind()
    x = torch.randn(1, T, 40, generator=draw).to(DEVICE)
    whole = mechanism(q, k, v, x=x)
    output, state = mechanism.with_state(q[:, :, :9], k[:, :, :9], v[:, :, :9], x=x[:, :9])
    torch.testing.assert_close(output, whole[:, :, :9], rtol=1e-5, atol=1e-5)
    for t in range(9, T):
        output, state = mechanism.step(q[:, :, t], k[:, :, t], v[:, :, t], state, x=x[:, t])
        torch.testing.assert_close(output, whole[:, :, t], rtol=1e-5, atol=1e-5)
