import pytest
import torch
from torch import Tensor

from linattn import create_mechanism
from mechanisms.formulas import FORMS, TOLERANCE, draw, per_query_head


def build(seed: int = 0, **options):
    torch.manual_seed(seed)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "num_features": 20}
    return create_mechanism("performer", **shape | options).double()


def explicit(mechanism, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The formula in log space, pair by pair: safe for vectors of any length."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = per_query_head(k, 4), per_query_head(v, 4)
    w = per_query_head(mechanism.directions.double()[None], 4)[0]

    def log_phi(x: Tensor) -> Tensor:
        y = x / 6**0.25
        return torch.einsum("bhtd,hfd->bhtf", y, w) - (y**2).sum(-1, keepdim=True) / 2

    log_weights = torch.logsumexp(log_phi(q).unsqueeze(3) + log_phi(k).unsqueeze(2), dim=-1)
    if causal:
        log_weights = log_weights.masked_fill(~torch.ones(log_weights.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return log_weights.softmax(-1) @ v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", FORMS)
def test_formula(impl, causal):
    q, k, v = draw()
    mechanism = build(causal=causal, impl=impl)
    torch.testing.assert_close(mechanism(q, k, v), explicit(mechanism, q, k, v, causal), **TOLERANCE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [1e-6, 10.0, 1e3])
def test_vectors_of_any_length(scale, causal):
    q, k, v = draw()
    mechanism = build(causal=causal)
    expected = explicit(mechanism, q * scale, k * scale, v, causal)
    # exponents reach |k|^2/2 ~ 1e7 at scale 1e3, and fp64 keeps them to ~1e-9
    torch.testing.assert_close(mechanism(q * scale, k * scale, v), expected, rtol=1e-7, atol=1e-7)
    found = mechanism.float()(*(x.float() for x in (q * scale, k * scale, v)))
    values = per_query_head(v, 4).float()
    assert (found <= values.amax(2, keepdim=True) + 1e-5).all()  # an average of the values: no denominator was lost
    assert (found >= values.amin(2, keepdim=True) - 1e-5).all()


@pytest.mark.parametrize("causal", [True, False])
def test_gradient_does_not_see_the_scale(causal):
    mechanism = build(causal=causal)
    found, expected = ([x.requires_grad_() for x in draw()] for _ in range(2))
    mechanism(*found).square().sum().backward()
    explicit(mechanism, *expected, causal).square().sum().backward()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_does_not_set_the_scale(causal):
    q, k, v = draw()
    k = k * 30  # every real feature is below exp(-100); a padded key of 0 has features of 1
    mask = torch.arange(11) % 3 > 0
    mechanism = build(causal=causal)
    out = mechanism(q, k, v, key_mask=mask.expand(2, -1))
    expected = explicit(mechanism, q[:, :, mask], k[:, :, mask], v[:, :, mask], causal)
    # exponents reach 1e3: fp64 keeps them to ~1e-13
    torch.testing.assert_close(out[:, :, mask], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_have_scales_of_their_own(causal):
    q, k, v = (x[:1] for x in draw())
    k = torch.cat([k[:, :, :5], k[:, :, 5:] * 30], dim=2)
    mechanism = build(causal=causal)
    out = mechanism(q, k, v, cu_seqlens=torch.tensor([0, 5, 11]))
    for piece in (slice(0, 5), slice(5, 11)):
        expected = explicit(mechanism, q[:, :, piece], k[:, :, piece], v[:, :, piece], causal)
        torch.testing.assert_close(out[:, :, piece], expected, rtol=1e-9, atol=1e-10)


def kernel_estimates(q: Tensor, k: Tensor, num_features: int, draws: int) -> Tensor:
    """Estimates ``(draws, 4, T)`` of exp(q.k / sqrt(D)) for the pairs (q_t, k_t)."""
    mechanism = build(num_kv_heads=4, num_features=num_features)
    estimates = []
    for _ in range(draws):
        mechanism.redraw()
        estimates.append((mechanism.log_features(q) + mechanism.log_features(k)).exp().mean(-1)[0])
    return torch.stack(estimates)


def test_features_are_unbiased():
    q, k, _ = draw(kv_heads=4)
    features, draws = 12, 400
    exact = ((q * k).sum(-1) / 6**0.5).exp()[0]
    # One Gaussian feature has variance exact^2 (exp(|y_q + y_k|^2) - 1); orthogonal ones have no more.
    spread = ((q + k)[0] / 6**0.25).square().sum(-1)
    mild = spread < 3  # where this variance says something about 400 draws
    assert mild.sum() >= 8
    deviation = exact * (spread.exp() - 1).div(features * draws).sqrt()
    found = kernel_estimates(q, k, features, draws).mean(0)
    assert ((found - exact).abs() < 5 * deviation)[mild].all()


def test_directions_are_orthogonal_in_blocks():
    directions = build(num_features=15).directions
    for block in directions.split(6, dim=1):
        gram = block @ block.mT
        off_diagonal = gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
        assert off_diagonal.abs().max() < 1e-5  # drawn in fp32
    lengths = build(num_features=3000).directions.square().sum(-1)
    # |w|^2 is chi-squared with 6 degrees: mean 6, variance 12; 6000 draws, five deviations
    assert lengths.mean().item() == pytest.approx(6, abs=5 * (12 / 6000) ** 0.5)


def test_redraw_and_checkpoint():
    mechanism = build()
    before = mechanism.directions.clone()
    mechanism.redraw(torch.Generator().manual_seed(1))
    drawn = mechanism.directions.clone()
    assert not torch.equal(before, drawn)
    other = build(seed=2)
    other.redraw(torch.Generator().manual_seed(1))
    assert torch.equal(other.directions, drawn)
    kept = build(seed=3)
    kept.load_state_dict(mechanism.state_dict())
    assert torch.equal(kept.directions, drawn)


def test_number_of_features():
    assert create_mechanism("performer", num_heads=1, head_dim=64).num_features == 266  # 64 log 64
    assert create_mechanism("performer", num_heads=1, head_dim=1).num_features == 1
