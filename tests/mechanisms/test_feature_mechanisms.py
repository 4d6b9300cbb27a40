"""Mechanisms that are a feature map and nothing else: elu, relu, hedgehog, taylor."""

import pytest
import torch
from torch import Tensor

from kernels.device import DEVICE
from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, per_query_head, scores, weighted


def elu_weights(q: Tensor, k: Tensor) -> Tensor:
    def phi(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.exp())

    return scores(phi(q), phi(k))


def relu_weights(q: Tensor, k: Tensor) -> Tensor:
    return scores(q * (q > 0), k * (k > 0))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize(("name", "weights"), [("elu", elu_weights), ("relu", relu_weights)])
def test_fixed_features(name, weights, impl, causal):
    q, k, v = draw()
    mechanism = create_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=6, causal=causal, impl=impl)
    torch.testing.assert_close(mechanism(q, k, v), weighted(weights(q, k), v, causal), **TOLERANCE)


@pytest.mark.parametrize("impl", FORMS)
def test_relu_takes_another_eps(impl):
    q, k, v = draw()
    q = 1e-7 * q  # of the size where 1e-6 weighs
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "impl": impl}
    for eps in (1e-6, 1e-15):
        expected = weighted(relu_weights(q, k), v, causal=False, eps=eps)
        torch.testing.assert_close(create_mechanism("relu", eps=eps, **options)(q, k, v), expected, **TOLERANCE)


@pytest.mark.parametrize("eps", [1e-15, 1e-30])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_a_small_eps_leaves_rows_without_features_at_zero(impl, dtype, causal, eps):
    q, k, v = (x.to(DEVICE, dtype) for x in draw())
    q[:, :, 3], q[:, :, 4] = 0, -1
    k[..., 5] = -1
    q[:, :, 6, :5], q[:, :, 6, 5] = -1, 1  # its only channel is no key's
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mechanism = create_mechanism("relu", num_heads=4, num_kv_heads=2, head_dim=6, eps=eps, impl=impl, causal=causal)
    out = mechanism(*leaves)
    assert torch.equal(out[:, :, [3, 4, 6]], torch.zeros_like(out[:, :, :3]))
    gradients = torch.autograd.grad(out.float().square().sum() + out.float().sum(), leaves)
    assert all(found.isfinite().all() for found in (out, *gradients))
    assert not gradients[0][:, :, [3, 4, 6]].any()


@pytest.mark.parametrize("causal", [True, False])
def test_hedgehog(causal):
    q, k, v = draw()
    mechanism = create_mechanism("hedgehog", num_heads=4, num_kv_heads=2, head_dim=6, causal=causal).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn_like(parameter))

    def phi(x: Tensor, maps: Tensor) -> Tensor:
        up = torch.einsum("bhti,hij->bhtj", x, maps).exp()
        return torch.cat([up / up.sum(-1, keepdim=True), (1 / up) / (1 / up).sum(-1, keepdim=True)], dim=-1)

    weights = scores(phi(q, mechanism.query_map.weight), phi(k, mechanism.key_map.weight))
    torch.testing.assert_close(mechanism(q, k, v), weighted(weights, v, causal), **TOLERANCE)


def test_hedgehog_starts_at_the_identity():
    mechanism = create_mechanism("hedgehog", num_heads=4, num_kv_heads=2, head_dim=6)
    assert torch.equal(mechanism.query_map.weight, torch.eye(6).expand(4, 6, 6))
    assert torch.equal(mechanism.key_map.weight, torch.eye(6).expand(2, 6, 6))


@pytest.mark.parametrize("feature_dim", [3, None])
@pytest.mark.parametrize("causal", [True, False])
def test_taylor(feature_dim, causal):
    q, k, v = draw()
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "causal": causal, "feature_dim": feature_dim}
    mechanism = create_mechanism("taylor", **options).double()
    if feature_dim is None:
        assert mechanism.num_parameters == 0
        z = scores(q, k) / 6**0.5
    else:
        a, c = mechanism.query_map.weight, per_query_head(mechanism.key_map.weight[None], 4)[0]
        z = torch.einsum("bhti,hif,hjf,bhsj->bhts", q, a, c, per_query_head(k, 4)) / feature_dim**0.5
    torch.testing.assert_close(mechanism(q, k, v), weighted(1 + z + z**2 / 2, v, causal), **TOLERANCE)


def test_taylor_default_projection():
    mechanism = create_mechanism("taylor", num_heads=2, head_dim=64)
    assert mechanism.num_features == 17 * 18 // 2
    bound = 64**-0.5
    for parameter in mechanism.parameters():
        assert parameter.abs().max() <= bound
        # 2048 draws of a uniform distribution: its deviation bound/sqrt(3) is met to a few percent
        assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
