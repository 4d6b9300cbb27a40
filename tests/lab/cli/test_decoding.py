import json

import typer
from linattn.lab.cli.decoding import decoding
from linattn.lab.cli.throughput import throughput
from typer.testing import CliRunner

from linattn.lab.bench.throughput import run as throughput_run


def call(command, *arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160", "TERM": "dumb"})


def test_a_quick_measure_of_decoding_end_to_end(tmp_path):
    arguments = ["--device", "cpu", "--quick", "--mechanisms", "elu", "--contexts", "16,8", "--batch", 1]
    result = call(decoding, *arguments, "--steps", 2, "--output", tmp_path, "--name", "mine")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "mine.json").read_text())
    found = [(row["mechanism"], row["context"], row["mode"], row["status"]) for row in data["rows"]]
    assert found == [(m, T, "eager", "ok") for m in ("softmax", "elu") for T in (8, 16)]
    assert data["meta"]["settings"]["dtype"] == "float32"
    assert (tmp_path / "mine.png").exists()
    for text in ("batch 1, eager", "than softmax", "state x 1, memory x 1", "mine.json"):
        assert text in result.output
    wrong = call(decoding, *arguments, "--mechanisms", "agent", "--output", tmp_path)
    assert wrong.exit_code == 2
    assert "--mechanisms" in wrong.output


def test_a_quick_measure_of_throughput_end_to_end(monkeypatch, tmp_path):
    monkeypatch.setattr(throughput_run, "compile_host", lambda model, mode, backend: model)
    arguments = ["--device", "cpu", "--quick", "--mechanisms", "elu", "--lengths", "8,16", "--steps", 1, "--no-chart"]
    result = call(throughput, *arguments, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "throughput.json").read_text())
    assert [(row["length"], row["batch"]) for row in data["rows"]] == [(8, 2), (16, 1)] * 2
    assert not (tmp_path / "throughput.png").exists()
    assert call(throughput, *arguments, "--tokens", 20).exit_code == 2
