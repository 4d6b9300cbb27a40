"""The command: files, tables and exit codes, on random activations and inside a tiny model."""

import json

import pytest
import typer
from tests.convert.tiny import llama
from typer.testing import CliRunner

from linattn.lab.cli.lab_dof import dof
from linattn.lab.theory.dof.charts import bound_curve, curve
from linattn.lab.theory.dof.measure import Row
from linattn.lab.theory.dof.run import Result

app = typer.Typer()
app.command()(dof)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dof")
    llama().save_pretrained(folder / "tiny")
    arguments = ["--quick", "--activations", str(folder / "tiny"), "--output", str(folder / "out")]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}), folder / "out"


def test_the_command_writes_results_charts_and_a_page(run):
    result, folder = run
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "lab-dof.json").read_text())
    assert {row["source"] for row in found["rows"]} == {"random", "tiny"}
    assert found["meta"]["settings"]["points"] == 48
    assert all(error > 0 for row in found["rows"] for error in row["kernel_error"])
    assert found["summary"] in " ".join(result.output.split())
    for source in ("random", "tiny"):
        assert (folder / f"lab-dof-{source}.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "lab-dof.html").read_text()
    assert page.count("<svg") > 6
    assert found["summary"] in page
    assert 'id="errors"' in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def row(sampling, count, errors, bound):
    return Row("random", "draw 0", sampling, count, 3.0, errors, errors, errors, bound, bound)


def test_curves_are_geometric_means_with_the_lowest_and_the_highest():
    rows = [row("leverage", 16, [0.1, 0.4], 2.0), row("leverage", 16, [0.2, 0.2], 3.0)]
    ((count, mean, low, high),) = curve(rows, "leverage", "kernel")
    assert (count, low, high) == (16, 0.1, 0.4)
    assert mean == pytest.approx(0.2)
    assert bound_curve(rows, "sum") == [(16, 3.0)]
    assert bound_curve(rows, "row") == []


def test_a_bound_that_fails_too_often_is_said():
    meta = {"settings": {"delta": 0.05}}
    normal, good, bad = row("normal", 16, [9.0], None), row("leverage", 16, [0.1] * 9, 1.0), [0.1] * 8 + [2.0]
    assert Result(meta, [normal, good]).passed
    assert Result(meta, [normal, good]).within == (18, 18)
    assert not Result(meta, [normal, row("leverage", 16, bad, 1.0)]).passed
    assert "16 of 18 errors lie within" in Result(meta, [normal, row("leverage", 16, bad, 1.0)]).summary()


def test_wrong_options_end_with_a_sentence(tmp_path):
    result = CliRunner().invoke(app, ["--counts", "16", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "at least two" in " ".join(result.output.split())
    assert CliRunner().invoke(app, ["--quick", "--large"]).exit_code == 2


@pytest.mark.parametrize(("preset", "points"), [("--quick", 48), ("--large", 1024)])
def test_what_is_given_wins_over_a_preset(preset, points, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("linattn.lab.theory.dof.run.dof_on_screen", lambda config, *rest: seen.append(config) or 0)
    assert CliRunner().invoke(app, [preset, "--seeds", "3", "--output", str(tmp_path)]).exit_code == 0
    assert (seen[0].seeds, seen[0].points) == (3, points)
