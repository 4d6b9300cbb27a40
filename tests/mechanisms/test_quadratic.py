import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, scores, weighted

KINDS = ({"form": "exact"}, {"form": "compact"}, {"form": "compact", "linear_term": True}, {"form": "normalized"})


def build(**options):
    torch.manual_seed(0)
    return create_mechanism("quadratic", num_heads=4, num_kv_heads=2, head_dim=6, **options).double()


def move(mechanism):
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return mechanism


def weights(mechanism, q: Tensor, k: Tensor) -> Tensor:
    z = scores(q, k) / 6**0.5
    if mechanism.form == "exact":
        return 1 + z + z**2 / 2
    if mechanism.form == "normalized":
        q, k = (x**2 / (x**4).sum(-1, keepdim=True).sqrt() for x in (q, k))
        return scores(q, k) + mechanism.c**2
    w = mechanism.alpha**2 * scores(q**2, k**2) + mechanism.gamma**2 + 1
    return (w + mechanism.beta**2 * 2 * z if mechanism.linear_term else w) / 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_formula(kind, impl, causal):
    q, k, v = draw()
    mechanism = move(build(causal=causal, impl=impl, **kind))
    expected = weighted(weights(mechanism, q, k), v, causal, eps=0)
    torch.testing.assert_close(mechanism(q, k, v), expected, **TOLERANCE)


def test_squares_of_the_compact_form_weigh_as_many_times_as_there_are_channels():
    q, k, _ = draw()
    mechanism, z = build(linear_term=True), scores(q, k) / 6**0.5
    mechanism.reset_parameters()
    squares = scores(q.square() / 6**0.5, k.square() / 6**0.5)  # those of z^2, without its mixed products
    expected = 1 + z + 6 * squares / 2
    torch.testing.assert_close(scores(mechanism.features(q), mechanism.features(k)), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "names", "features"),
    [
        (KINDS[0], [], 28),
        (KINDS[1], ["alpha", "gamma"], 7),
        (KINDS[2], ["alpha", "beta", "gamma"], 13),
        (KINDS[3], ["c"], 7),
    ],
)
def test_parameters(kind, names, features):
    mechanism = build(**kind)
    assert [name for name, _ in mechanism.named_parameters()] == names
    assert mechanism.num_features == features
    move(mechanism).reset_parameters()
    assert all(p.item() == 1 for p in mechanism.parameters())
    q, k, v = draw()
    mechanism(q.requires_grad_(), k, v).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in mechanism.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_fp16_does_not_overflow(kind):
    q, k, v = draw()
    q, k, v = (150 * q).half(), (150 * k).half(), v.half()
    mechanism = build(**kind)
    exact = mechanism(q.double(), k.double(), v.double())
    found = mechanism.half()(q, k, v)
    # weights from features in fp32, the output rounded once
    assert (found.double() - exact).abs().max() <= 2**-11 * exact.abs().max() + 1e-5
