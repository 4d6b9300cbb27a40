"""Errors by their definitions, the bound, where activations come from, and the command."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.convert.tiny_folder import model_folder, text_file
from tests.lab.page.html_page import parse

from linattn.convert.degrees.kernel import LeverageDensity, log_estimate, normal_features, scaled, spectrum
from linattn.lab.cases import Work
from linattn.lab.command import main
from linattn.lab.theory.dof import Dof, curve, deviation, error_bounds, errors_of, head_of, within
from linattn.support.options import OptionError

SMALL = {"counts": (16, 256), "seeds": 4, "points": 40, "heads": 1, "dim": 6}
TOLERANCE, DELTA = 2**-4, 0.05


def cases_of(**options):
    return Dof(**SMALL | options).cases()


def head(case):
    return head_of(case["config"], case["head"])


@pytest.fixture(scope="module")
def points():
    return head(cases_of()[0])[1]


def test_errors_are_norms_of_the_difference_of_operators(points):
    y = scaled(points)
    features = normal_features(1, 32, 6, torch.Generator().manual_seed(0))
    exact, estimate = (y @ y.mT).exp(), log_estimate(y[None], y[None], features)[0].exp()
    kernel, weighted, rows = errors_of(y, y @ y.mT, features)
    assert kernel == pytest.approx(float((estimate - exact).norm() / exact.norm()))
    worst = torch.linalg.matrix_norm(estimate - exact, 2) / torch.linalg.matrix_norm(exact, 2)
    assert weighted == pytest.approx(float(worst))
    p, e = (matrix / matrix.sum(-1, keepdim=True) for matrix in (exact, estimate))
    assert rows == pytest.approx(float((p - e).abs().sum(-1).mean() / 2))


def test_the_deviation_solves_the_inequality_and_falls_as_features_grow():
    for degrees, count, tolerance in ((3.0, 64, 2**-4), (50.0, 16, 2**-8)):
        t, p = deviation(degrees, count, tolerance, DELTA), 1 / (1 + tolerance)
        right = (p + t / 3) * degrees / count * math.log(8 * degrees / (p * DELTA))
        assert t * t / 2 == pytest.approx(right)
    found = [deviation(5.0, count, TOLERANCE, DELTA) for count in (2**10, 2**20, 2**22)]
    assert found[0] > found[1]
    assert found[1] / found[2] == pytest.approx(2, rel=1e-2)  # as 1 / sqrt(M) in the end


def test_the_operator_inequality_behind_the_bound_holds(points):
    """-t (Sigma + lambda) <= Sigma^ - Sigma <= t (Sigma + lambda), from which all bounds follow."""
    density, y = LeverageDensity(points, TOLERANCE), scaled(points)
    gram = (y @ y.mT).exp()
    gram = gram / torch.linalg.eigvalsh(gram).max()
    log_top = float(spectrum(points).log_top)
    values, basis = torch.linalg.eigh(gram)
    root = basis / (values + TOLERANCE).sqrt() @ basis.mT
    for count in (16, 256):
        t, worst = deviation(density.limit, count, TOLERANCE, DELTA), []
        for seed in range(20):
            drawn = density.draw(count, torch.Generator().manual_seed(seed))
            estimate = (log_estimate(y[None], y[None], drawn)[0] - log_top).exp()
            worst.append(torch.linalg.matrix_norm(root @ (estimate - gram) @ root, 2))
        assert max(worst) <= t
        assert max(worst) > t / 20  # a bound that is no bound at all would be far off


def test_bounds_are_relative_to_the_kernel(points):
    values = spectrum(points).values
    t = deviation(LeverageDensity(points, TOLERANCE).limit, 10**8, TOLERANCE, DELTA)
    kernel, weighted = error_bounds(values, t, TOLERANCE, DELTA)
    assert weighted == pytest.approx(t * (1 + TOLERANCE))
    assert kernel == pytest.approx(t * float((values + TOLERANCE).norm() / values.norm()))
    large = 1e4  # the trace is then the better bound
    trace = math.sqrt(large * (1 + TOLERANCE) * float(values.sum()) * (1 + 1 / DELTA)) / float(values.norm())
    assert error_bounds(values, large, TOLERANCE, DELTA)[0] == pytest.approx(trace)


def test_rows_have_every_way_of_drawing_and_bounds_for_one(tmp_path):
    (case,) = cases_of()
    rows = Dof.measure(case, Work(tmp_path))["rows"]
    assert [(row["sampling"], row["count"], row["kernel_bound"] is None) for row in rows] == [
        ("normal", 16, True), ("normal", 256, True), ("leverage", 16, False), ("leverage", 256, False)
    ]  # fmt: skip
    assert all(len(row["kernel_error"]) == 4 for row in rows)
    assert np.mean(rows[3]["kernel_error"]) < 0.5 * np.mean(rows[2]["kernel_error"])
    assert within(rows) == (16, 16)


def test_numbers_stay_those_of_published_results(tmp_path):
    published = json.loads((Path(__file__).parents[3] / "results" / "cpu" / "lab-dof.json").read_text())["rows"]
    case = Dof(counts=(16, 1024), seeds=2).cases()[1]
    case["config"]["counts"] = [16]
    for row in Dof.measure(case, Work(tmp_path))["rows"]:
        expected = next(
            each for each in published if all(each[key] == row[key] for key in ("head", "sampling", "count"))
        )
        for name in ("kernel_error", "sum_error", "row_error"):
            assert row[name] == pytest.approx(expected[name][:2], rel=1e-6)
        assert row["degrees"] == pytest.approx(expected["degrees"])
        assert row["kernel_bound"] == (None if row["sampling"] == "normal" else pytest.approx(expected["kernel_bound"]))


def test_random_activations_have_the_norm_that_was_asked_for():
    _, points = head(cases_of(points=20_000, norm=2.0)[0])
    assert float(scaled(points).square().sum(-1).mean()) == pytest.approx(2.0, rel=0.03)


def test_settings_and_files_that_make_no_sense_are_refused(tmp_path):
    (tmp_path / "config.json").touch()
    for change, words in (
        ({"counts": (16,)}, "at least two"), ({"seeds": 1}, "seeds"), ({"delta": 0.5}, "delta"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"activations": tmp_path}, "a file for the model to read"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=words):
            Dof(**SMALL | change)
    with pytest.raises(OptionError, match="must be a folder with config"):
        head(cases_of(activations=tmp_path / "x", text=tmp_path / "config.json")[1])
    config = Dof.parse({"seeds": "3", "quick": "yes"}).cases()[0]["config"]
    assert (config["seeds"], config["points"]) == (3, 48)  # what is given wins


def test_the_command_measures_random_activations_and_a_model(tmp_path, capsys):
    folder, text = model_folder(tmp_path / "tiny"), text_file(tmp_path / "text.txt")
    arguments = ["lab", "dof", "--quick", "--activations", str(folder), "--text", str(text), "--output",
                 str(tmp_path / "out"), "--where", "here"]  # fmt: skip
    capsys.readouterr()
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = results["rows"]
    assert {row["source"] for row in rows} == {"random", "tiny"}
    assert all(error > 0 for row in rows for error in row["kernel_error"])
    said = "of 16 errors lie within the bound."
    assert said in shown
    root = parse((tmp_path / "out" / "report.html").read_text())
    assert said in root.text
    assert len(root.find("svg", role="img")) == 6
    for source in ("random", "tiny"):
        assert (tmp_path / "out" / f"dof-{source}.png").read_bytes().startswith(b"\x89PNG")
    assert main(["lab", "dof", "--counts", "16", "--output", str(tmp_path)]) == 2


def row(sampling, count, errors, bound):
    errors_of_all = dict.fromkeys(("kernel_error", "sum_error", "row_error"), errors)
    return {"sampling": sampling, "count": count, "kernel_bound": bound, "sum_bound": bound} | errors_of_all


def test_curves_are_geometric_means():
    rows = [row("leverage", 16, [0.1, 0.4], 2.0), row("leverage", 16, [0.2, 0.2], 3.0), row("normal", 16, [9.0], None)]
    assert curve(rows, "leverage", "kernel") == [(16, pytest.approx(0.2))]


def test_a_bound_that_fails_too_often_is_told_by_the_exit_code(tmp_path, monkeypatch):
    normal, bad = row("normal", 16, [9.0], None), row("leverage", 16, [0.1] * 8 + [2.0], 1.0)
    assert within([normal, bad]) == (16, 18)
    measured = [each | {"head": "draw 0", "degrees": 3.0} for each in (normal, bad)]
    monkeypatch.setattr(Dof, "measure", staticmethod(lambda case, work: {"rows": measured}))
    assert main(["lab", "dof", "--quick", "--output", str(tmp_path), "--where", "here"]) == 1
