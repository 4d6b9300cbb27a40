"""Features drawn by leverage scores: the right density, the right weights, and a smaller error for it."""

import math

import pytest
import torch

from linattn.convert.degrees.gram import kernel_degrees
from linattn.convert.degrees.kernel import PositiveFeatures, log_estimate, log_features, normal_features, scaled
from linattn.convert.degrees.leverage import LeverageDensity, leverage_features

D, TOLERANCE = 4, 2**-4


@pytest.fixture(scope="module")
def points():
    return torch.randn(40, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(scope="module")
def density(points):
    return LeverageDensity(points, TOLERANCE)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def kernel(points, scale=None):
    y = scaled(points, scale)
    return (y @ y.mT).exp()


def test_scores_are_those_of_the_definition(points, density):
    z = torch.randn(50, D, generator=generator(), dtype=torch.float64)
    y, gram = scaled(points), kernel(points)
    phi = (z @ y.mT - y.square().sum(-1) / 2).exp()
    ridge = TOLERANCE * torch.linalg.eigvalsh(gram).max() * torch.eye(len(gram), dtype=gram.dtype)
    expected = (phi @ torch.linalg.inv(gram + ridge) * phi).sum(-1)
    # Directions far below the tolerance are left out, which costs a thousandth at most.
    torch.testing.assert_close(density.scores(z).log_tau.exp(), expected, rtol=1e-3, atol=0)


def test_the_mean_score_under_the_normal_is_the_degrees_of_freedom(points, density):
    z = torch.randn(50_000, D, generator=generator(), dtype=torch.float64)
    scores = density.scores(z).log_tau.exp()
    error = scores.std() / len(z) ** 0.5
    assert density.degrees == pytest.approx(float(kernel_degrees(points, TOLERANCE)), rel=1e-9)
    assert abs(scores.mean() - density.limit) < 5 * error
    assert density.degrees <= density.limit <= 1.001 * density.degrees


def test_the_estimate_is_unbiased_with_alpha_the_inverse_density(points, density):
    """The mean of K^ over draws is K; with other weights, or twice as large ones, it is not."""
    drawn = density.draw(30_000, generator())
    y = scaled(points)
    terms = (math.log(drawn.number) + 2 * log_features(y[None], drawn)[0]).exp()  # of K^(x, x), each z
    mean, error = terms.mean(-1), terms.std(-1) / drawn.number**0.5
    off = (mean - kernel(points).diagonal()) / error
    assert off.abs().max() < 5
    assert off.mean().abs() < 3
    relative = (log_estimate(y[None], y[None], drawn)[0].exp() / kernel(points) - 1).abs()
    assert relative.mean() < 0.03
    without = PositiveFeatures(drawn.z, torch.zeros_like(drawn.log_alpha))
    assert (log_estimate(y[None], y[None], without)[0].exp() / kernel(points) - 1).abs().mean() > 1


def test_draws_have_the_density_that_their_weights_say(density):
    """Under q the mean of alpha is the integral of N(0, I): 1. A sampler of another density would miss it."""
    alpha = density.draw(20_000, generator(1)).log_alpha[0].exp()
    assert abs(alpha.mean() - 1) < 5 * alpha.std() / len(alpha) ** 0.5
    assert alpha.std() > 0.1


def test_fewer_features_are_needed_than_of_the_normal(points, density):
    y, exact = scaled(points)[None], kernel(points)

    def errors(draw):
        found = [
            (log_estimate(y, y, draw(generator(seed)))[0].exp() - exact).norm() / exact.norm() for seed in range(8)
        ]
        return torch.stack(found).median()

    normal = errors(lambda seeded: normal_features(1, 64, D, seeded))
    assert errors(lambda seeded: density.draw(64, seeded)) < 0.6 * normal


def test_huge_norms_neither_overflow_nor_run_forever():
    x = 12 * torch.randn(2, 30, D, generator=generator(), dtype=torch.float64)  # K(x, x) of e^500 and more
    drawn = leverage_features(x, 32, generator=generator())
    assert drawn.z.shape == (2, 32, D)
    assert drawn.log_alpha.shape == (2, 32)
    assert all(part.isfinite().all() for part in drawn)
    top = scaled(x).square().sum(-1).max(-1)
    estimate = log_estimate(scaled(x), scaled(x), drawn)
    found = torch.stack([estimate[head, i, i] for head, i in enumerate(top.indices)])
    torch.testing.assert_close(found, top.values, atol=1.5, rtol=0)  # the largest entry of K, as a logarithm


def test_the_same_seed_draws_the_same():
    x = torch.randn(1, 20, D)
    first, second = (leverage_features(x, 8, generator=generator(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
