"""Effective rank of known matrices; energy that a ReLU cuts off."""

import math

import pytest
import torch

from linattn import create_mechanism
from linattn.analysis.energy import energy_lost, energy_sums
from linattn.analysis.entropy import effective_rank


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def test_energy_of_each_head_with_its_keys():
    q, k = randn(2, 4, 5, 8), randn(2, 2, 7, 8, seed=1)
    relu = create_mechanism("relu", num_heads=4, num_kv_heads=2, head_dim=8)
    expected = []
    for h in range(4):
        own = torch.cat([q[:, h].flatten(), k[:, h // 2].flatten()])
        expected.append(float(own[own < 0].square().sum() / own.square().sum()))
    assert energy_lost(relu, q, k) == pytest.approx(expected)
    assert energy_lost(relu, q.abs(), k.abs()) == [0.0] * 4
    assert energy_lost(relu, -q.abs(), -k.abs()) == [1.0] * 4
    assert energy_lost(relu, q * 0, k * 0) == [None] * 4
    assert energy_lost(create_mechanism("pola", num_heads=4, num_kv_heads=2, head_dim=8), q, k) == [0.0] * 4


@pytest.mark.parametrize("modulation", ["sequence", "none"])
def test_mirror_counts_what_it_reflected(modulation):
    torch.manual_seed(0)
    q, k = randn(2, 2, 5, 8) + 1, randn(2, 2, 5, 8, seed=1) - 1
    mirror = create_mechanism("mirror", num_heads=2, head_dim=8, modulation=modulation).double()
    lost, total = energy_sums(mirror, q, k)
    assert float(lost.sum() / total.sum()) == pytest.approx(mirror.energy_loss(q, k).item())
    relu = create_mechanism("relu", num_heads=2, head_dim=8)
    assert energy_lost(mirror, q, k) != pytest.approx(energy_lost(relu, q, k), abs=0.01)
    assert float(total.sum()) == pytest.approx(float(q.square().sum() + k.square().sum()))  # an isometry


def test_inputs_are_turned_before_they_are_cut():
    class Turned(type(create_mechanism("relu", num_heads=2, head_dim=8))):
        rotates = "inputs"

    q, k = randn(1, 2, 5, 8).abs(), randn(1, 2, 5, 8, seed=1).abs()

    def rotate(q, k):
        return -q, -k

    assert energy_lost(Turned(2, 8), q, k, rotate=rotate) == [1.0, 1.0]
    assert energy_lost(create_mechanism("relu", num_heads=2, head_dim=8), q, k, rotate=rotate) == [0.0, 0.0]
