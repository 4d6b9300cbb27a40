import json

import pytest
import typer
from linattn.lab.cli.bench_kernels import kernels
from linattn.lab.cli.bench_models import models
from typer.testing import CliRunner


def call(command, *arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160", "TERM": "dumb"})


def test_a_quick_race_of_kernels_end_to_end(tmp_path):
    arguments = ["--device", "cpu", "--quick", "--cases", "causal-4096", "--no-chart", "--output", tmp_path]
    result = call(kernels, *arguments, "--contenders", "linattn chunked", "--rivals", "none")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "kernels.json").read_text())
    assert data["meta"]["settings"]["rivals"] == []
    assert {(row["contender"], row["status"]) for row in data["rows"]} == {("linattn chunked", "ok")}
    assert data["goals"] == data["cold"] == []  # of the whole size, on a GPU
    assert "kernels.json" in result.output
    again = call(kernels, *arguments, "--contenders", "linattn chunked", "--rivals", "none", "--resume")
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "kernels.json").read_text())["rows"] == data["rows"]


def test_a_quick_race_of_models_end_to_end(tmp_path):
    arguments = ["--device", "cpu", "--quick", "--cases", "vit-224", "--mechanisms", "relu", "--modes", "compiled"]
    result = call(models, *arguments, "--output", tmp_path, "--name", "mine")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "mine.json").read_text())
    assert [(row["mechanism"], row["status"]) for row in data["rows"]] == [("softmax", "ok"), ("relu", "ok")]
    assert data["rows"][1]["over_softmax"] > 0
    for text in ("of softmax", "attention: 3 x chunked", "beside its kernels: aten.relu 6x", "mine.json"):
        assert text in result.output


@pytest.mark.parametrize(
    ("command", "arguments", "parts"),
    [
        (kernels, ["--rivals", "flash"], ["--rivals", "torch, softmax, fla, mlstm_kernels"]),
        (kernels, ["--cases", "nothing"], ["--cases", "causal-4096"]),
        (kernels, ["--processes", "-1"], ["--processes", ">= 0"]),
        (kernels, ["--seconds", "0"], ["--seconds", "greater than 0"]),
        (models, ["--cases", "nothing"], ["--cases", "vit-224"]),
        (models, ["--modes", "fast"], ["--modes", "compiled, cuda-graph, reduce-overhead"]),
        (models, ["--mechanisms", "nobody"], ["--mechanisms", "gated-head"]),
        (models, ["--backend", "none"], ["--backend", "inductor"]),
    ],
)
def test_a_bad_option_is_named_without_a_traceback(command, arguments, parts, tmp_path):
    result = call(command, "--device", "cpu", "--quick", *arguments, "--output", tmp_path)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert all(part in result.output for part in parts), result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [kernels, models])
def test_a_cpu_is_refused_without_quick(command, tmp_path):
    result = call(command, "--device", "cpu", "--output", tmp_path)
    assert result.exit_code == 2
    assert "--device" in result.output
    assert "--quick" in result.output
