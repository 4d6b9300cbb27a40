"""Entropies, their theorems, how they follow the norm of the query, and effective ranks."""

import math
from functools import partial

import pytest
import torch

from linattn.analysis.entropy import effective_rank, entropy, entropy_norm_correlation, positive_sequence_entropy

EXACT = {"rtol": 0, "atol": 1e-10}


def rand(*shape: int, seed: int = 0, draw=torch.rand) -> torch.Tensor:
    return draw(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


randn = partial(rand, draw=torch.randn)


def test_entropy_of_rows():
    weights = rand(2, 3, 4, 5)
    p = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(entropy(weights), torch.distributions.Categorical(probs=p).entropy(), **EXACT)
    assert float(entropy(torch.full((7,), 1e-300, dtype=torch.float64))) == pytest.approx(math.log(7))
    assert entropy(torch.tensor([0.0, 3.0, 0.0])) == 0
    assert entropy(torch.zeros(4)) == 0


def test_negative_weights_count_by_size_or_not_at_all():
    row = torch.tensor([2.0, -1.0, 1.0]).double()
    torch.testing.assert_close(entropy(row), entropy(row.abs()), **EXACT)
    torch.testing.assert_close(positive_sequence_entropy(row), entropy(torch.tensor([2.0, 1.0]).double()), **EXACT)
    weights = rand(10, 6)
    torch.testing.assert_close(positive_sequence_entropy(weights), entropy(weights), **EXACT)
    assert positive_sequence_entropy(-weights).abs().amax() == 0


def test_what_a_scale_does():
    """Proposition 2 of NaLaFormer: homogeneous maps do not see it. Theorem 1: exp does. Powers sharpen (theorem 2)."""
    x = rand(50, 9)
    for power in (1, 2.5):
        scaled = positive_sequence_entropy((7 * x) ** power)
        torch.testing.assert_close(scaled, positive_sequence_entropy(x**power), **EXACT)
    steps = torch.stack([positive_sequence_entropy((c * x).exp()) for c in (1, 2, 4, 8, 16, 100)])
    assert (steps.diff(dim=0) < 0).all()
    powers = torch.stack([positive_sequence_entropy(x**p) for p in (1, 1.5, 2, 3, 4.5)])
    assert (powers.diff(dim=0) < 0).all()


def test_correlation_is_pearsons():
    a, b = rand(3, 2, 5), rand(3, 2, 5, seed=1)
    expected = [float(torch.corrcoef(torch.stack([a[:, h].flatten(), b[:, h].flatten()]))[0, 1]) for h in range(2)]
    assert entropy_norm_correlation(a, b) == pytest.approx(expected, abs=1e-11)
    assert entropy_norm_correlation(a, 3 - 2 * a) == [-1.0, -1.0]
    assert entropy_norm_correlation(a, 4 + 1e-4 * b) == [None, None]  # normed queries: one length but for an eps
    assert None not in entropy_norm_correlation(a, 4 + b)
    assert entropy_norm_correlation(torch.zeros_like(a), b) == [None, None]
    assert entropy_norm_correlation(5 + 1e-7 * a.float(), b) == [None, None]  # one entropy but for rounding
    with pytest.raises(ValueError, match=r"entropy and norm must be \(B, H, T\) alike"):
        entropy_norm_correlation(a, b[0])


def test_effective_rank_of_known_matrices():
    a, b = randn(6), randn(9, seed=1)
    outer = torch.outer(a, b)
    assert float(effective_rank(torch.eye(7).double())) == pytest.approx(7)
    assert float(effective_rank(outer)) == pytest.approx(1, abs=1e-6)
    u, _ = torch.linalg.qr(randn(6, 6))
    v, _ = torch.linalg.qr(randn(9, 9))
    sigma = torch.tensor([4.0, 2.0, 2.0]).double()  # p = 1/2, 1/4, 1/4: entropy 1.5 log 2
    matrix = (u[:, :3] * sigma) @ v[:, :3].mT
    assert float(effective_rank(5 * matrix)) == pytest.approx(2**1.5)
    batch = effective_rank(torch.stack([outer, matrix, torch.zeros(6, 9).double(), outer * math.nan]))
    assert batch[:3].tolist() == pytest.approx([1, 2**1.5, 0], abs=1e-6)
    assert batch[3].isnan()
    assert effective_rank(torch.eye(4).bfloat16()).item() == pytest.approx(4)
