"""Closed forms against tasks that are drawn, against least squares, and against one another."""

import pytest
import torch

from linattn.lab.theory.icl_tasks import Aligned, Curve, Drift, Gaussian, Retrieval, equicorrelated, power_law, root

D, N, TASKS = 4, 6, 400_000

ANY = Gaussian(D, 0.7, task_covariance=power_law(D, 1.5, seed=1), feature_covariance=equicorrelated(D, 0.4))
SOURCE = Gaussian(D, task_covariance=power_law(D, 1.0, seed=2), feature_covariance=equicorrelated(D, 0.4))
CASES = {
    "covariances": (Curve("", ANY), "uniform"),
    "low rank": (Curve("", ANY, rank=2), "uniform"),
    "update": (Curve("", ANY, rank=1, source=SOURCE), "uniform"),
    "retrieval": (Curve("", Retrieval(D, 0.5, alignment=0.6)), "uniform"),
    "alignment": (Curve("", Aligned(D, 0.5, alignment=0.5)), "uniform"),
    "drift, free": (Curve("", Drift(D, 0.3, memory=0.7)), "free"),
    "drift, equal": (Curve("", Drift(D, 0.3, memory=0.7)), "uniform"),
    "drift, gate": (Curve("", Drift(D, 0.3, memory=0.7)), "geometric"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_risk_is_that_of_the_formulas_predictor_and_least_squares_find_no_better_one(name):
    curve, weighting = CASES[name]
    W, w = (optimum := curve.optimum(N, weighting)).preconditioner, optimum.weights
    x, y = (part.double() for part in curve.data.sample((TASKS,), N, torch.Generator().manual_seed(7)))
    query, answer, x, y = x[:, -1], y[:, -1], x[:, :-1], y[:, :-1]
    f = torch.einsum("ta,ab,tnb,n,tn->t", query, W, x, w, y)
    assert (answer - f).square().mean().item() == pytest.approx(optimum.risk, rel=0.01)
    assert answer.square().mean().item() == pytest.approx(curve.data.power, rel=0.01)
    if name in ("covariances", "retrieval", "alignment"):  # over all W
        features, expected = (query.unsqueeze(2) * (y.unsqueeze(1) @ x)).flatten(1), W.flatten()
    elif name == "drift, free":  # over all weights of the examples
        features, expected = (x @ query.unsqueeze(2)).squeeze(2) * y, w
    else:
        return
    found = torch.linalg.solve(features.T @ features, features.T @ answer)
    assert (answer - features @ found).square().mean().item() == pytest.approx(optimum.risk, rel=0.01)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_weights_help_exactly_where_samples_cannot_be_swapped():
    kinds = ("free", "geometric", "uniform")
    drifting = [Drift(D, memory=0.8).optimum(N, kind).risk for kind in kinds]
    assert drifting[0] < drifting[1] < drifting[2]
    for data in (ANY, Retrieval(D, alignment=0.6), Aligned(D, alignment=0.5), Drift(D, memory=1.0)):
        risks = [data.optimum(N, kind).risk for kind in kinds]
        assert max(risks) - min(risks) < 1e-9


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("make", [Gaussian, Retrieval, Aligned, Drift])
def test_without_their_own_structure_all_are_isotropic(make, noise):
    optimum = make(D, noise).optimum(N)
    assert optimum.risk == pytest.approx(D + noise - N * D / (N + D + 1 + noise), rel=1e-12)
    step = optimum.weights.mean() * optimum.preconditioner
    torch.testing.assert_close(step, torch.eye(D, dtype=torch.float64) / (N + D + 1 + noise))


def test_low_rank_is_a_minimum_among_matrices_of_that_rank():
    optimum = ANY.optimum(N, rank=2)
    U, s, Vh = torch.linalg.svd(optimum.preconditioner)
    assert s[2] < 1e-12 < s[1]
    left, right = U[:, :2] * s[:2].sqrt(), s[:2].sqrt().unsqueeze(1) * Vh[:2]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        step = [torch.randn(part.shape, dtype=torch.float64, generator=generator) for part in (left, right)]
        moved = (left + 0.01 * step[0] * left.norm()) @ (right + 0.01 * step[1] * right.norm())
        assert ANY.risk_of(moved, N) > optimum.risk


def test_an_update_leaves_the_singular_values_beyond_its_rank():
    """``L* + n sum_{i>r} s_i^2`` with s of ``(V'* - V*) A'^1/2``: from the old model's risk to the new optimum."""
    factor = root(equicorrelated(D, 0.4))
    gap = factor @ (ANY.optimum(N).preconditioner - SOURCE.optimum(N).preconditioner) @ factor
    A = (N + 1) * ANY.S + (ANY.S.trace() + ANY.noise) * torch.eye(D, dtype=torch.float64)
    values = torch.linalg.svdvals(gap @ root(A))
    for rank in range(D + 1):
        expected = ANY.optimum(N).risk + N * values[rank:].square().sum().item()
        assert ANY.optimum(N, rank=rank, source=SOURCE).risk == pytest.approx(expected, rel=1e-12)
    assert ANY.optimum(N, rank=0, source=SOURCE).risk == pytest.approx(ANY.risk_of(SOURCE.optimum(N).preconditioner, N))
