"""PolaFormer and PolaFormer++: two flows, written as two attentions and as matrices of weights."""

import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, scores, weighted

NAMES = ("pola", "pola_plus")


def build(name: str, **options):
    """Parameters away from where they start: what they do must show."""
    torch.manual_seed(0)
    mechanism = create_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=6, **options).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn_like(parameter))
    return mechanism


def per_query_head(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=0).unsqueeze(1)  # (4, 1, ..)


def pola_flows(mechanism, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the two flows, before normalisation: products of positive and negative parts."""
    power = 1 + 4 / (1 + (-mechanism.power).exp())
    scale = (1 + mechanism.scale.exp()).log()
    (qp, qn), (kp, kn) = (
        [((sign * x) / c).clamp(min=0) ** p for sign in (1, -1)]
        for x, c, p in (
            (q, per_query_head(scale), per_query_head(power)),
            (k, scale.unsqueeze(1), power.unsqueeze(1)),
        )
    )
    return scores(qp, kp) + scores(qn, kn), scores(qn, kp) + scores(qp, kn)


def pola_plus_flows(mechanism, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    qp, qn, kp, kn = (x.clamp(min=0) for x in (q, -q, k, -k))
    keys = torch.cat([kp, kn], dim=-1).expm1()
    same = (torch.cat([qp, qn], dim=-1) * torch.sigmoid(mechanism.same)[:, None]).expm1()
    opposite = (torch.cat([qn, qp], dim=-1) * torch.sigmoid(mechanism.opposite)[:, None]).expm1()
    return scores(same, keys), scores(opposite, keys)


FLOWS = {"pola": pola_flows, "pola_plus": pola_plus_flows}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_formula(name, impl, causal):
    q, k, v = draw()
    mechanism = build(name, causal=causal, impl=impl)
    same, opposite = FLOWS[name](mechanism, q, k)
    eps = 1e-6 if causal else 1e-6 * 11
    halves = [weighted(w, x, causal, eps=eps) for w, x in ((same, v[..., :3]), (opposite, v[..., 3:]))]
    torch.testing.assert_close(mechanism(q, k, v), torch.cat(halves, dim=-1), **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_eps_belongs_to_the_mean_over_real_keys(name):
    """Tiny keys make eps count: masked, packed and alone must still agree, and agree with the mean's formula."""
    q, k, v = (x[:1] for x in draw())
    k = 1e-3 * k if name == "pola" else 1e-6 * k
    mechanism = build(name)
    parts = [mechanism(*(x[:, :, piece] for x in (q, k, v))) for piece in (slice(0, 3), slice(3, 11))]
    packed = mechanism(q, k, v, cu_seqlens=torch.tensor([0, 3, 11]))
    torch.testing.assert_close(packed, torch.cat(parts, dim=2), **TOLERANCE)
    masked = mechanism(q, k, v, key_mask=torch.arange(11)[None] >= 3)
    torch.testing.assert_close(masked[:, :, 3:], parts[1], **TOLERANCE)
    same, _ = FLOWS[name](mechanism, q[:, :, 3:], k[:, :, 3:])
    by_mean = torch.einsum("bhts,bhsd->bhtd", same, v[:, :, 3:, :3].repeat_interleave(2, dim=1)) / 8
    expected = by_mean / (same.mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(parts[1][..., :3], expected, **TOLERANCE)
    plain = weighted(same, v[:, :, 3:, :3], causal=False)
    assert (plain - expected).abs().max() > 1e-3  # eps does count here


def test_where_they_start():
    pola = create_mechanism("pola", num_heads=4, num_kv_heads=2, head_dim=6)
    x = torch.full((1, 2, 1, 6), 2.0)
    torch.testing.assert_close(pola.features(x)[..., :6], (x / torch.log(torch.tensor(2.0))) ** 3)
    assert create_mechanism("pola", num_heads=1, head_dim=2, alpha=2).features(x[:, :1, :, :2]).max() < 10
    plus = create_mechanism("pola_plus", num_heads=4, num_kv_heads=2, head_dim=6)
    assert {name: tuple(p.shape) for name, p in plus.named_parameters()} == {"same": (4, 12), "opposite": (4, 12)}
    for mechanism in (pola, plus):
        torch.nn.init.ones_(next(mechanism.parameters()))
        mechanism.reset_parameters()
        assert not any(p.any() for p in mechanism.parameters())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_fp16_does_not_overflow(name, causal):
    """Third powers of 100, and exp(30), are beyond fp16, which the output is not."""
    q, k, v = draw()
    size = 25.0 if name == "pola" else 8.0
    q, k, v = (size * q).half(), (size * k).half(), v.half()
    mechanism = create_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=6, causal=causal)
    exact = mechanism.double()(q.double(), k.double(), v.double())
    found = mechanism.half()(q, k, v)
    assert found.dtype == torch.float16
    # a weighted mean, computed in fp32 and rounded once: half a unit of fp16
    assert (found.double() - exact).abs().max() <= 2**-11 * exact.abs().max() + 1e-5


def test_exponents_are_bounded():
    q, k, v = (1e4 * x.float() for x in draw())
    out = create_mechanism("pola_plus", num_heads=4, num_kv_heads=2, head_dim=6)(q, k, v)
    assert out.isfinite().all()
