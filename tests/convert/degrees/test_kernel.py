"""Degrees of freedom and features against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn.convert.degrees.kernel import (
    LeverageDensity,
    PositiveFeatures,
    kernel_degrees,
    log_estimate,
    log_features,
    scaled,
)

D, TOLERANCE = 4, 2**-4


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, factor=1.0, seed=0):
    return factor * torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def points():
    return normal(40, D)


@pytest.fixture(scope="module")
def density(points):
    return LeverageDensity(points, TOLERANCE)


def kernel(points):
    y = scaled(points)
    return (y @ y.mT).exp()


def test_degrees_are_the_trace_of_the_ridge_projection():
    x = normal(2, 30, 6)
    gram = (x @ x.mT * 6**-0.5).exp()
    for head, matrix in enumerate(gram):
        ridge = TOLERANCE * torch.linalg.matrix_norm(matrix, 2) * torch.eye(len(matrix), dtype=matrix.dtype)
        expected = torch.trace(matrix @ torch.linalg.inv(matrix + ridge))
        torch.testing.assert_close(kernel_degrees(x, TOLERANCE)[head], expected, rtol=1e-9, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 30), st.integers(1, 20), st.floats(1e-3, 1.0))
def test_they_lie_between_one_and_the_number_of_points_and_fall_with_the_tolerance(factor, count, tolerance):
    x = normal(1, count, 6, factor=factor)  # K(x, x) of up to e^5000: overflows unless scores are shifted
    degrees = kernel_degrees(x, tolerance)
    assert 1 / (1 + tolerance) - 1e-9 <= degrees.item() <= count + 1e-9
    assert (kernel_degrees(x, tolerance * 2) <= degrees).all()


def test_scores_are_those_of_the_definition(points, density):
    z = normal(50, D)
    y, gram = scaled(points), kernel(points)
    phi = (z @ y.mT - y.square().sum(-1) / 2).exp()
    ridge = TOLERANCE * torch.linalg.eigvalsh(gram).max() * torch.eye(len(gram), dtype=gram.dtype)
    expected = (phi @ torch.linalg.inv(gram + ridge) * phi).sum(-1)
    # Directions far below the tolerance are left out, which costs a thousandth at most.
    torch.testing.assert_close(density.scores(z)[0].exp(), expected, rtol=1e-3, atol=0)


def test_the_mean_score_under_the_normal_is_the_degrees_of_freedom(points, density):
    z = normal(50_000, D)
    scores = density.scores(z)[0].exp()
    error = scores.std() / len(z) ** 0.5
    assert density.degrees == pytest.approx(float(kernel_degrees(points, TOLERANCE)), rel=1e-9)
    assert abs(scores.mean() - density.limit) < 5 * error
    assert density.degrees <= density.limit <= 1.001 * density.degrees


def test_the_estimate_is_unbiased_with_alpha_the_inverse_density(points, density):
    """The mean of K^ over draws is K; with other weights, or twice as large ones, it is not."""
    drawn = density.draw(30_000, generator())
    y = scaled(points)
    terms = (math.log(drawn.z.shape[1]) + 2 * log_features(y[None], drawn)[0]).exp()  # of K^(x, x), each z
    mean, error = terms.mean(-1), terms.std(-1) / drawn.z.shape[1] ** 0.5
    off = (mean - kernel(points).diagonal()) / error
    assert off.abs().max() < 5
    assert off.mean().abs() < 3
    relative = (log_estimate(y[None], y[None], drawn)[0].exp() / kernel(points) - 1).abs()
    assert relative.mean() < 0.03
    without = PositiveFeatures(drawn.z, torch.zeros_like(drawn.log_alpha))
    assert (log_estimate(y[None], y[None], without)[0].exp() / kernel(points) - 1).abs().mean() > 1


def test_huge_norms_neither_overflow_nor_run_forever():
    x = normal(30, D, factor=12)  # K(x, x) of e^500 and more
    drawn, again = (LeverageDensity(x).draw(32, generator()) for _ in range(2))
    assert (drawn.z.shape, drawn.log_alpha.shape) == ((1, 32, D), (1, 32))
    assert all(part.isfinite().all() for part in drawn)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    top, i = scaled(x).square().sum(-1).max(-1)
    estimate = log_estimate(scaled(x)[None], scaled(x)[None], drawn)
    torch.testing.assert_close(estimate[0, i, i], top, atol=1.5, rtol=0)  # the largest entry of K, as a logarithm
