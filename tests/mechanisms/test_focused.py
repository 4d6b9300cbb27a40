import math

import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, per_query_head, scores, weighted


def build(power: float = 3, **options):
    torch.manual_seed(0)
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
    mechanism = create_mechanism("focused", **heads | {"power": power} | options).double()
    torch.nn.init.normal_(mechanism.scale)
    return mechanism


def features(x: Tensor, scale: Tensor, power: float) -> Tensor:
    """As published: heads joined to one wide vector first, split again afterwards."""
    heads = x.shape[1]
    scale = per_query_head(scale[None], heads).flatten()
    wide = x.transpose(1, 2).flatten(2)
    wide = (wide * (wide > 0) + 1e-6) / (1 + scale.exp()).log()
    length = wide.norm(dim=-1, keepdim=True)
    powered = wide**power
    return (powered / powered.norm(dim=-1, keepdim=True) * length).unflatten(2, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("power", [3, 1.5])
def test_formula(power, impl, causal):
    q, k, v = draw()
    mechanism = build(power, impl=impl, causal=causal)
    weights = scores(*(features(x, mechanism.scale, power) for x in (q, k)))
    expected = weighted(weights, v, causal, eps=1e-6 if causal else 1.1e-5)
    torch.testing.assert_close(mechanism(q, k, v), expected, **TOLERANCE)


def test_starting_scale():
    mechanism = create_mechanism("focused", num_heads=4, head_dim=6)
    assert not mechanism.scale.any()
    x = torch.full((1, 4, 1, 6), 2.0)
    torch.testing.assert_close(mechanism.features(x), x / math.log(2), rtol=1e-5, atol=1e-5)


def test_long_vectors_do_not_overflow():
    """The cube of 1e15 squared is past fp32; its direction is not."""
    mechanism = create_mechanism("focused", num_heads=4, head_dim=6)
    x = 1e15 * torch.rand(1, 4, 3, 6)
    torch.testing.assert_close(mechanism.features(x), mechanism.double().features(x.double()).float())


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_in_fp16_are_in_range(causal):
    """Features are near 1, but gradients of what is raised to a power are not: rounded to fp16 some are infinite."""
    for seed in range(10):
        torch.manual_seed(seed)
        mechanism = create_mechanism("focused", num_heads=2, head_dim=16, causal=causal).half()
        inputs = [torch.randn(2, 2, 33, 16).half().requires_grad_() for _ in range(3)]
        mechanism(*inputs).float().square().sum().backward()
        assert all(x.grad.isfinite().all() for x in inputs)
