import subprocess
import sys

import pytest
from typer.testing import CliRunner

import linattn
from linattn.lab.cli.main import app


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160", "TERM": "dumb"})


def test_version():
    result = call("--version")
    assert (result.exit_code, result.output.strip()) == (0, f"linattn {linattn.__version__}")


def test_help_has_conversion_and_laboratories():
    shown = call("--help").output
    assert all(f" {name} " in shown for name in ("linearize", "inspect", "lab"))
    shown = call("lab", "--help").output
    assert all(f" {name} " in shown for name in ("icl", "synth", "entropy", "dof"))


@pytest.mark.parametrize(
    "command",
    [
        ["linearize", "folder", "--out", "out"],
        ["inspect", "folder", "--text", "words.txt"],
        ["lab", "icl"],
        ["lab", "synth", "depo"],
        ["lab", "entropy"],
        ["lab", "dof"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_an_unknown_option_is_named(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*command, "--colour", "red")
    assert result.exit_code == 2
    assert "No such option: --colour" in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (["lab", "magic"], ["No such command", "magic"]),
        (["lab", "icl", "--families", "magic"], ["--families", "drift"]),
        (["lab", "synth", "magic"], ["value for TASK: must be one of depo", "lano"]),
        (["lab", "entropy", "--device", "tpu"], ["--device", "cpu, cuda"]),
        (["lab", "dof", "--threads", "-1"], ["--threads", ">= 0"]),
    ],
)
def test_a_bad_word_of_a_laboratory_is_named(command, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*command)
    assert result.exit_code == 2
    assert all(part in result.output for part in parts), result.output
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_loads_no_charts_and_no_profiler():
    code = "import sys, linattn.lab.cli.main; print([m for m in ('matplotlib', 'accelerate') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
