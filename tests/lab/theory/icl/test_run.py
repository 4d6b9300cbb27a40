"""The laboratory end to end: small models reach their formulas, files, resuming, wrong options."""

import json

import pytest
import torch
from typer.testing import CliRunner

from linattn.lab.cli.main import app
from linattn.lab.theory.icl import screen
from linattn.lab.theory.icl.rows import Result, Row
from linattn.lab.theory.icl.run import run_unit
from linattn.lab.theory.icl.settings import IclConfig
from linattn.lab.theory.icl.words import summary

SMALL = ["--quick", "--device", "cpu", "--dimension", 3, "--lengths", "4,8", "--steps", 350, "--tests", 8192]


def call(*arguments):
    return CliRunner().invoke(app, ["lab", "icl", *map(str, arguments)], env={"COLUMNS": "160", "TERM": "dumb"})


def test_trained_models_reach_their_formulas_and_h3_wins_where_tasks_drift(tmp_path, monkeypatch):
    drift = [*SMALL, "--families", "drift", "--models", "linear,h3", "--output", tmp_path]
    result = call(*drift)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "lab-icl.json").read_text())
    rows = data["rows"]
    assert len(rows) == 2 * 3 * 2
    for row in rows:  # the same tasks as the formula's predictor, so that their luck cancels
        assert abs(row["excess"]) < 0.03
        assert row["formula_measured"] == pytest.approx(row["theory"], abs=4 * row["standard_error"])
        assert row["step_error"] < 0.25
    gains = {(gain["case"], gain["n"]): gain for gain in data["gains"]}
    assert gains["memory 0.8", 8]["measured"] > 0.5 * gains["memory 0.8", 8]["theory"] > 0.01
    assert abs(gains["memory 1", 8]["measured"]) < 0.02
    assert gains["memory 1", 8]["theory"] == 0
    page = (tmp_path / "lab-icl.html").read_text()
    for text in ("memory 0.95: risk / d", "H3 beside linear attention", "memory 0.8", "within 5\u00a0%"):
        assert text in page
    assert (tmp_path / "lab-icl-drift.png").stat().st_size > 10_000

    # Nothing is left to train: a resumed run only shows what is there.
    monkeypatch.setattr(screen, "run_unit", lambda *_: pytest.fail("trained again"))
    again = call(*drift, "--resume", "--no-chart")
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "lab-icl.json").read_text())["rows"] == rows
    other = call(*drift, "--resume", "--seed", 1)
    assert other.exit_code == 2
    assert "other settings" in other.output


def test_an_interrupted_run_keeps_what_is_finished(tmp_path, monkeypatch):
    def stop_at_h3(config, family, model, on_step):
        if model == "h3":
            raise KeyboardInterrupt
        return [Row(family, "memory 1", model, 3, 0, 0.5, 0.5, 0.5, 0.01, 0.0, 0.0, 0.1)]

    monkeypatch.setattr(screen, "run_unit", stop_at_h3)
    result = call("--quick", "--device", "cpu", "--families", "drift", "--output", tmp_path, "--no-chart")
    assert result.exit_code == 130
    found = json.loads((tmp_path / "lab-icl.json").read_text())
    assert found["meta"]["interrupted"]
    assert [row["model"] for row in found["rows"]] == ["linear"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--families", "nothing"], "--families"),
        (["--models", "nothing"], "--models"),
        (["--families", "low-rank", "--models", "h3"], "--models"),
        (["--lengths", "3,3"], "--lengths"),
        (["--steps", 0], "--steps"),
        (["--lr", 0], "--lr"),
        (["--device", "tpu"], "--device"),
    ],
)
def test_wrong_options_are_named_before_any_work(arguments, named, tmp_path):
    result = call("--quick", "--device", "cpu", "--output", tmp_path, *arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("family", "model"), [("low-rank-update", "linear"), ("retrieval", "canon"), ("drift", "elu")])
def test_other_units_give_a_row_for_every_model(family, model):
    config = IclConfig(d=3, lengths=(2, 4), seeds=2, steps=20, batch=16, tests=512, device="cpu")
    rows = run_unit(config, family, model)
    cases = {"low-rank-update": 4, "retrieval": 4, "drift": 3}[family]
    assert [(row.n, row.seed) for row in rows] == [(2, 0), (2, 1), (4, 0), (4, 1)] * cases
    assert all(row.trained > 0 and (row.step_error is None) == (model == "elu") for row in rows)
    result = Result({"settings": {"tolerance": 0.02}}, rows)
    assert len(summary(result)) == 1


@pytest.mark.gpu
def test_models_in_twenty_dimensions_are_within_two_per_cent_of_the_formula():
    config = IclConfig(families=("independent",), lengths=(5, 60), seeds=1, device="cuda")
    result = Result({"settings": {"tolerance": config.tolerance}})
    for family, model in (("independent", "linear"), ("alignment", "linear"), ("drift", "h3")):
        result.rows += run_unit(config, family, model)
    assert not result.beyond
    torch.cuda.synchronize()
