"""Entropies, their theorems, and how they follow the norm of the query."""

import math

import pytest
import torch

from linattn import create_mechanism
from linattn.analysis.attention_map import attention_map
from linattn.analysis.entropy import entropy, entropy_norm_correlation, positive_sequence_entropy

EXACT = {"rtol": 0, "atol": 1e-10}


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


@pytest.mark.parametrize("power", [1, 2.5])
def test_homogeneous_maps_do_not_see_a_scale(power):
    """Proposition 2 of NaLaFormer."""
    x = rand(20, 9)
    scaled = positive_sequence_entropy((7 * x) ** power)
    torch.testing.assert_close(scaled, positive_sequence_entropy(x**power), **EXACT)


def test_exp_sees_a_scale_and_powers_sharpen():
    """Theorem 1, and x^p with p > 1 as the convex map of theorem 2."""
    x = rand(50, 9)
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


def entropies(name: str, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return entropy(attention_map(create_mechanism(name, num_heads=2, head_dim=16).double(), q, k))


def test_softmax_and_nala_sharpen_with_the_norm_and_relu_cannot():
    """The claim of NaLaFormer on random vectors: queries of equal direction and different length."""
    q, k = randn(2, 2, 200, 16), randn(2, 2, 40, 16, seed=1)
    length = 0.02 + 1.2 * rand(2, 2, 200, 1, seed=2)
    chance = 4 / 400**0.5  # four standard deviations of the correlation of 400 unrelated pairs
    q = q / q.norm(dim=-1, keepdim=True)
    for name in ("softmax", "nala"):
        falls = entropies(name, 1.5 * q, k) < entropies(name, 0.1 * q, k)
        # A row of nala is a sum over channels, each of which sharpens: that needs not hold for every sum.
        assert falls.double().mean() > 0.95
        assert falls.all() or name == "nala"
        varied = entropies(name, length * q, k)
        assert max(entropy_norm_correlation(varied, length.squeeze(-1))) < -chance
    for factor in (0.1, 1.5, length):
        torch.testing.assert_close(entropies("relu", factor * q, k), entropies("relu", q, k), **EXACT)
    unmoved = entropies("relu", length * q, k)
    assert unmoved.std() > 1e-2
    assert max(map(abs, entropy_norm_correlation(unmoved, length.squeeze(-1)))) < chance
