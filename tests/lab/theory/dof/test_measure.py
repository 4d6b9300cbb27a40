"""Errors by their definitions, the bound, and where activations come from."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from linattn.convert.degrees.gram import spectrum
from linattn.convert.degrees.kernel import log_estimate, normal_features, scaled
from linattn.convert.degrees.leverage import LeverageDensity
from linattn.lab.theory.dof.activations import random_heads, real_heads
from linattn.lab.theory.dof.measure import _errors, deviation, error_bounds, measure_head
from linattn.lab.theory.dof.settings import DofConfig
from linattn.support.options import OptionError

CONFIG = DofConfig(counts=(16, 256), seeds=4, points=40, heads=1, dim=6)


@pytest.fixture(scope="module")
def head():
    return random_heads(CONFIG)[0]


def test_errors_are_norms_of_the_difference_of_operators(head):
    y = scaled(head.points)
    features = normal_features(1, 32, 6, torch.Generator().manual_seed(0))
    exact, estimate = (y @ y.mT).exp(), log_estimate(y[None], y[None], features)[0].exp()
    kernel, weighted, rows = _errors(y, y @ y.mT, features)
    assert kernel == pytest.approx(float((estimate - exact).norm() / exact.norm()))
    worst = torch.linalg.matrix_norm(estimate - exact, 2) / torch.linalg.matrix_norm(exact, 2)
    assert weighted == pytest.approx(float(worst))
    p, e = (matrix / matrix.sum(-1, keepdim=True) for matrix in (exact, estimate))
    assert rows == pytest.approx(float((p - e).abs().sum(-1).mean() / 2))


def test_the_deviation_solves_the_inequality_and_falls_as_features_grow():
    for degrees, count, tolerance in ((3.0, 64, 2**-4), (50.0, 16, 2**-8)):
        t, p = deviation(degrees, count, tolerance, 0.05), 1 / (1 + tolerance)
        right = (p + t / 3) * degrees / count * math.log(8 * degrees / (p * 0.05))
        assert t * t / 2 == pytest.approx(right)
    found = [deviation(5.0, count, 2**-4, 0.05) for count in (2**10, 2**20, 2**22)]
    assert found[0] > found[1]
    assert found[1] / found[2] == pytest.approx(2, rel=1e-2)  # as 1 / sqrt(M) in the end


def test_the_operator_inequality_behind_the_bound_holds(head):
    """-t (Sigma + lambda) <= Sigma^ - Sigma <= t (Sigma + lambda), from which all bounds follow."""
    density, y = LeverageDensity(head.points, CONFIG.tolerance), scaled(head.points)
    gram = (y @ y.mT).exp()
    gram = gram / torch.linalg.eigvalsh(gram).max()
    log_top = float(spectrum(head.points).log_top)
    values, basis = torch.linalg.eigh(gram)
    root = basis / (values + CONFIG.tolerance).sqrt() @ basis.mT
    for count in (16, 256):
        t, worst = deviation(density.limit, count, CONFIG.tolerance, CONFIG.delta), []
        for seed in range(20):
            drawn = density.draw(count, torch.Generator().manual_seed(seed))
            estimate = (log_estimate(y[None], y[None], drawn)[0] - log_top).exp()
            worst.append(torch.linalg.matrix_norm(root @ (estimate - gram) @ root, 2))
        assert max(worst) <= t
        assert max(worst) > t / 20  # a bound that is no bound at all would be far off


def test_rows_have_every_way_of_drawing_and_bounds_for_one(head):
    rows = list(measure_head(head, CONFIG))
    assert [(row.sampling, row.count) for row in rows] == [
        ("normal", 16), ("normal", 256), ("leverage", 16), ("leverage", 256)
    ]  # fmt: skip
    assert all(len(row.kernel_error) == 4 for row in rows)
    assert all((row.kernel_bound is None) == (row.sampling == "normal") for row in rows)
    few, many = rows[2:]
    assert np.mean(many.kernel_error) < 0.5 * np.mean(few.kernel_error)
    for row in (few, many):
        assert max(row.kernel_error) <= row.kernel_bound
        assert max(row.sum_error) <= row.sum_bound
    assert rows == list(measure_head(head, CONFIG))  # the same seeds, the same numbers


def test_bounds_are_relative_to_the_kernel(head):
    density, values = LeverageDensity(head.points, CONFIG.tolerance), spectrum(head.points).values
    kernel, weighted = error_bounds(values, density, 10**8, CONFIG)
    t = deviation(density.limit, 10**8, CONFIG.tolerance, CONFIG.delta)
    assert weighted == pytest.approx(t * (1 + CONFIG.tolerance))
    assert kernel == pytest.approx(t * float((values + CONFIG.tolerance).norm() / values.norm()))


def test_random_activations_have_the_norm_that_was_asked_for():
    (found,) = random_heads(replace(CONFIG, points=20_000, norm=2.0))
    assert float(scaled(found.points).square().sum(-1).mean()) == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_activations_are_read_from_files(tmp_path, suffix):
    q, k = torch.randn(2, 4, 12, 6), torch.randn(2, 2, 12, 6)
    path = tmp_path / f"layer{suffix}"
    if suffix == ".npz":
        np.savez(path, q=q.numpy(), k=k.numpy())
    elif suffix == ".pt":
        torch.save({"q": q, "k": k}, path)
    else:
        from safetensors.torch import save_file

        save_file({"q": q, "k": k}, path)
    found = real_heads(replace(CONFIG, activations=path, heads=5, points=1000))
    assert [head.name for head in found] == ["layer 0, head 0", "layer 0, head 1"]
    both = torch.cat((q[:, 2:].reshape(-1, 6), k[:, 1].reshape(-1, 6)))
    assert torch.equal(found[1].points.sort(0).values, both.sort(0).values)


def test_settings_and_files_that_make_no_sense_are_refused(tmp_path):
    for change, words in (
        ({"counts": (16,)}, "at least two"), ({"seeds": 1}, "seeds"), ({"delta": 0.5}, "delta"),
        ({"tolerance": 0.0}, "tolerance"), ({"activations": tmp_path}, "config.json"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=words):
            replace(CONFIG, **change).check()
    torch.save({"q": torch.zeros(3)}, tmp_path / "a.pt")
    with pytest.raises(OptionError, match=r"must hold q \(B, H, T, D\)"):
        real_heads(replace(CONFIG, activations=tmp_path / "a.pt"))
