"""Degrees of freedom against their definition, and the sample they are measured on."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn.convert.degrees.gram import kernel_degrees, spectrum
from linattn.convert.degrees.points import Reservoir


def points(heads=2, count=30, dim=6, factor=1.0, seed=0):
    return factor * torch.randn(heads, count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("scale", [None, 0.2])
def test_it_is_the_trace_of_the_ridge_projection(scale):
    x, tolerance = points(), 2**-4
    gram = (x @ x.mT * (6**-0.5 if scale is None else scale)).exp()
    for head, matrix in enumerate(gram):
        ridge = tolerance * torch.linalg.matrix_norm(matrix, 2) * torch.eye(len(matrix), dtype=matrix.dtype)
        expected = torch.trace(matrix @ torch.linalg.inv(matrix + ridge))
        torch.testing.assert_close(kernel_degrees(x, tolerance, scale)[head], expected, rtol=1e-9, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 30), st.integers(1, 20), st.floats(1e-3, 1.0))
def test_it_lies_between_one_and_the_number_of_points_and_falls_with_the_tolerance(factor, count, tolerance):
    x = points(1, count, factor=factor)  # K(x, x) of up to e^5000: overflows unless scores are shifted
    found = kernel_degrees(x, tolerance)
    assert 1 / (1 + tolerance) - 1e-9 <= found.item() <= count + 1e-9
    assert (kernel_degrees(x, tolerance * 2) <= found).all()


def test_the_largest_eigenvalue_is_told_in_logarithms():
    x = points(1)
    exact = torch.linalg.eigvalsh((x @ x.mT / math.sqrt(6)).exp())[..., -1].log()
    torch.testing.assert_close(spectrum(x).log_top, exact)
    assert math.isfinite(spectrum(100 * x).log_top.item())


def test_a_tolerance_must_be_positive():
    with pytest.raises(ValueError, match="tolerance must be > 0"):
        kernel_degrees(points(), 0.0)


def labelled(batch, heads, length, first):
    """Tokens that tell their number, head 0 first."""
    numbers = first + torch.arange(batch * heads * length).view(batch, heads, length, 1)
    return numbers.float()


def test_a_reservoir_pools_the_queries_of_a_group_with_their_keys_and_leaves_out_padding():
    q, k = labelled(2, 4, 3, 0), labelled(2, 2, 3, 100)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    reservoir = Reservoir(1000)
    reservoir.add(q, k, mask)
    for head in range(2):
        expected = torch.cat(
            (q[:, 2 * head : 2 * head + 2].transpose(1, 2)[mask].flatten(), k[:, head][mask].flatten())
        )
        assert sorted(reservoir.points()[head].flatten().tolist()) == sorted(expected.tolist())
        assert sorted(reservoir.keys()[head].flatten().tolist()) == sorted(k[:, head][mask].flatten().tolist())
    torch.testing.assert_close(reservoir.key_mean()[0], k[:, 0][mask].mean(0))


def test_a_reservoir_draws_evenly_from_all_batches_and_in_disjoint_parts():
    seen = torch.zeros(60)
    for seed in range(400):
        reservoir = Reservoir(10, seed)
        for first, length in ((0, 4), (8, 1), (10, 25)):  # batches of different sizes
            reservoir.add(labelled(1, 1, length, first), labelled(1, 1, length, first + length))
        drawn = reservoir.draws(2)
        assert drawn.shape == (2, 1, 5, 1)
        assert len(set(drawn.flatten().tolist())) == 10
        seen[drawn.flatten().long()] += 1
    # 10 of 60 are drawn, 400 times: 66.7 each, with a standard deviation of 7.5.
    assert (seen - 400 / 6).abs().max() < 5 * 7.5
    halves = seen[:30].sum() / seen.sum()
    assert abs(halves - 0.5) < 0.04


def test_centring_moves_the_keys_alone():
    q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4) + 5
    reservoir = Reservoir(100)
    reservoir.add(q, k)
    moved = reservoir.points(center=True)
    sums = moved.sum((1, 2)), (q[0].sum((1, 2)))
    torch.testing.assert_close(*sums, atol=1e-3, rtol=0)  # centred keys add up to 0


def test_a_reservoir_refuses_heads_that_do_not_fit():
    with pytest.raises(ValueError, match=r"got \(1, 3, 4, 8\)"):
        Reservoir(4).add(torch.zeros(1, 3, 4, 8), torch.zeros(1, 2, 4, 8))
