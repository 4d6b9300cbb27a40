import math

import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, per_query_head, scores, weighted

ANGLES = ("hard", "direction", "raw", "scaled")


def build(**options):
    return create_mechanism("nala", num_heads=4, num_kv_heads=2, head_dim=6, **options)


def angle_of(x: Tensor, angle: str) -> Tensor:
    direction = x / x.norm(dim=-1, keepdim=True)
    steep = {"direction": direction, "raw": x, "scaled": 6**0.5 * direction}
    return math.pi / 4 * (x.sign() if angle == "hard" else steep[angle].tanh())


def paper_weights(q: Tensor, k: Tensor, angle: str, power: float = 3.0, tau: float = 0.5) -> Tensor:
    """Pair by pair: ``sum_i |d(q)_i|^p |k_i|^power cos(f(q)_i - f(k)_i)``."""
    k = per_query_head(k, q.shape[1])
    norm = q.norm(dim=-1, keepdim=True)
    size_q = (q / norm).abs() ** (power * (tau + norm.tanh()))
    opening = angle_of(q, angle).unsqueeze(3) - angle_of(k, angle).unsqueeze(2)  # (B, H, T, S, D)
    return (size_q.unsqueeze(3) * (k.abs() ** power).unsqueeze(2) * opening.cos()).sum(-1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("angle", ANGLES)
def test_formula(angle, causal):
    q, k, v = draw()
    weights = paper_weights(q, k, angle)
    assert weights.min() >= 0
    expected = weighted(weights, v, causal, eps=1e-6 if causal else 1.1e-5)
    torch.testing.assert_close(build(angle=angle, causal=causal)(q, k, v), expected, **TOLERANCE)


@pytest.mark.parametrize("impl", FORMS)
def test_options(impl):
    q, k, v = draw()
    expected = weighted(paper_weights(q, k, "raw", power=1.7, tau=0.9), v, False, eps=1.1e-5)
    found = build(angle="raw", power=1.7, tau=0.9, impl=impl)(q, k, v)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("power", [3.0, 1.0, 0.5])
@pytest.mark.parametrize("angle", ANGLES)
def test_zeros_are_finite(angle, power):
    """Whole tokens and single channels, where a power below 1 has a pole in its slope."""
    q, k, v = (x.requires_grad_() for x in draw())
    zero_q, zero_k = q.clone(), k.clone()
    zero_q[:, :, 2], zero_k[:, :, 4] = 0, 0
    zero_q[..., 1], zero_k[..., 3] = 0, 0
    out = build(angle=angle, power=power)(zero_q, zero_k, v)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients)
    assert out[:, :, 2].abs().max() == 0


@pytest.mark.parametrize("causal", [True, False])
def test_half_precision_holds_large_keys_and_small_features(causal):
    """|k|^3 is infinite in fp16 from 41 on, and |d(q)|^4.5 is nearly 0 in it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 20, 64, dtype=torch.float16).unbind()
    k = 50 * k
    mechanism = create_mechanism("nala", num_heads=2, head_dim=64, causal=causal)
    exact = mechanism(q.double(), k.double(), v.double())
    out = mechanism(q, k, v)
    assert out.dtype == torch.float16
    assert (out.double() - exact).abs().max() < 2**-11 * exact.abs().max() * 1.01  # the rounding of the result alone


def test_a_hard_angle_splits_the_signs():
    """The published code: cubed keys and powers of the positive and of the negative part, no angle anywhere."""
    q, k, v = draw()
    n = q.norm(dim=-1, keepdim=True)
    p = 3 * (0.5 + n.tanh())
    phi = torch.cat([(q / n).relu() ** p, (-q / n).relu() ** p], dim=-1)
    psi = torch.cat([(k**3).relu(), (-(k**3)).relu()], dim=-1)
    torch.testing.assert_close(scores(phi, psi), paper_weights(q, k, "hard"), **TOLERANCE)
    torch.testing.assert_close(build()(q, k, v), weighted(scores(phi, psi), v, False, eps=1.1e-5), **TOLERANCE)
