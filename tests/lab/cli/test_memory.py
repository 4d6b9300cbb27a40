import json
from inspect import signature

import pytest
import typer
from linattn.lab.bench.blocks.settings import BlocksConfig
from linattn.lab.cli.memory import memory
from typer.testing import CliRunner

from linattn.support import extras

SMALL = ["--tokens", "49,100", "--dim", "16", "--heads", "2"]
app = typer.Typer()
app.command()(memory)


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160", "TERM": "dumb"})


def test_end_to_end(tmp_path):
    result = call(*SMALL, "--output", tmp_path, "--batch", "2", "--seed", "4", "--precision", "bf16")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "block-memory.json").read_text())
    assert (tmp_path / "block-memory.png").read_bytes().startswith(b"\x89PNG")
    assert data["meta"]["seed"] == 4
    settings = data["meta"]["settings"]
    assert (settings["tokens"], settings["batch"], settings["precision"]) == ([49, 100], 2, "bf16")
    rows = data["rows"]
    assert {row["contender"] for row in rows} == {"softmax", "softmax (map)", "mirror", "nala"}
    assert len(rows) == 8
    assert {row["status"] for row in rows} == {"ok"}
    assert all(row["peak_bytes"] > 49 * 2 * 16 * 4 * 4 and row["seconds"] > 0 for row in rows)
    assert {(r["contender"], r["against"]) for r in data["reductions"]} == {
        (name, against) for name in ("mirror", "nala") for against in ("softmax", "softmax (map)")
    }
    for text in ("peak MiB", "than softmax (map) at 100 tokens", "block-memory.json", "block-memory.png"):
        assert text in result.output


def test_defaults_are_the_documented_table():
    defaults = {name: parameter.default for name, parameter in signature(memory).parameters.items()}
    config = BlocksConfig()
    assert tuple(map(int, defaults["tokens"].split(","))) == config.tokens
    assert tuple(defaults["mechanisms"].split(",")) == config.mechanisms
    for name in ("device", "dim", "heads", "batch", "precision", "seed", "max_seconds", "max_gib"):
        assert defaults[name] == getattr(config, name), name


def test_without_a_chart_and_with_a_name(tmp_path):
    arguments = ["--tokens", "16", *SMALL[2:], "--mechanisms", "elu", "--no-chart", "--name", "mine"]
    result = call(*arguments, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    rows = json.loads((tmp_path / "mine.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["softmax", "softmax (map)", "elu"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--tokens", "64,many"], ["--tokens", "'64,many'"]),
        (["--tokens", "0"], ["--tokens", ">= 1"]),
        (["--mechanisms", "nobody"], ["--mechanisms", "nala"]),
        (["--dim", "100"], ["--heads", "must divide dim"]),
        (["--precision", "fp8"], ["--precision", "auto, fp32, bf16"]),
        (["--device", "tpu"], ["--device", "cpu, cuda"]),
        (["--max-seconds", "0"], ["--max-seconds", "greater than 0"]),
        (["--threads", "-1"], ["--threads", ">= 0"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
)
def test_a_bad_option_is_named_without_a_traceback(arguments, parts, tmp_path):
    result = call(*arguments, "--output", tmp_path)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert all(part in result.output for part in parts), result.output
    assert list(tmp_path.iterdir()) == []


def test_a_missing_chart_library_is_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    result = call(*SMALL, "--output", tmp_path)
    assert result.exit_code == 2
    assert "pip install 'linattn[report]'" in result.output
    assert list(tmp_path.iterdir()) == []
