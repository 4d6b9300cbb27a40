import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import linattn
from linattn.lab.bench import contenders
from linattn.lab.cli.main import app
from linattn.mechanisms.registry import list_mechanisms
from linattn.support import extras

SMALL = ["--lengths", "32,64", "--heads", "2", "--head-dim", "8", "--quick"]


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


def test_mechanisms_shows_the_registry():
    result = call("mechanisms")
    assert result.exit_code == 0
    assert all(name in result.output for name in list_mechanisms())


def test_doctor_is_short_and_says_what_auto_chooses():
    result = call("doctor")
    assert result.exit_code == 0
    assert torch.__version__ in result.output
    assert "auto on cpu" in result.output
    assert len(result.output.splitlines()) < 20


def test_quick_bench_end_to_end(tmp_path):
    result = call("bench", *SMALL, "--output", tmp_path, "--mechanisms", "elu", "--seed", "3")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "attention-causal-elu.json").read_text())
    assert (tmp_path / "attention-causal-elu.png").read_bytes().startswith(b"\x89PNG")
    assert data["meta"]["seed"] == 3
    assert data["meta"]["threads"] == torch.get_num_threads()
    assert data["meta"]["settings"]["lengths"] == [32, 64]
    names = {row["contender"] for row in data["rows"]}
    assert names == {"sdpa", "chunked", "recurrent", "reference", "elu"}
    assert len(data["rows"]) == 2 * 2 * 5
    assert {row["status"] for row in data["rows"]} == {"ok"}
    for text in ("forward+backward", "vs sdpa", "growth", "attention-causal-elu.json"):
        assert text in result.output


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_bench_with_decay_bidirectional_in_bfloat16(tmp_path, decay):
    result = call(
        "bench", *SMALL, "--output", tmp_path, "--decay", decay, "--bidirectional", "--dtype", "bfloat16",
        "--no-backward", "--no-memory", "--no-chart", "--name", "mine",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "mine.json").read_text())["rows"]
    assert {row["pass_name"] for row in rows} == {"forward"}
    assert {row["peak_bytes"] for row in rows} == {None}
    assert not (tmp_path / "mine.png").exists()


def test_a_broken_form_exits_with_one_and_says_wrong(tmp_path, monkeypatch):
    right = contenders.linear_attention

    def broken(*args, impl, **options):
        return right(*args, impl=impl, **options) * (1.01 if impl == "recurrent" else 1)

    monkeypatch.setattr(contenders, "linear_attention", broken)
    result = call("bench", *SMALL, "--output", tmp_path, "--no-chart", "--no-memory", "--impl", "recurrent,reference")
    assert result.exit_code == 1
    assert "WRONG" in result.output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--impl", "fast"], ["--impl", "auto, reference, recurrent, chunked", "'fast'"]),
        (["--lengths", "64,many"], ["--lengths", "'64,many'"]),
        (["--lengths", "0"], ["--lengths", ">= 1"]),
        (["--decay", "slow"], ["--decay", "none, head, token, channel"]),
        (["--dtype", "int8"], ["--dtype", "float32"]),
        (["--device", "tpu"], ["--device", "cpu, cuda"]),
        (["--device", "cuda:99"], ["--device", "cuda:99"]),
        (["--mechanisms", "nobody"], ["--mechanisms", "elu"]),
        (["--head-dim", "0"], ["--head-dim", ">= 1"]),
        (["--batch", "x"], ["--batch", "valid int"]),
        (["--threads", "-1"], ["--threads", ">= 0"]),
        (["--max-gib", "0"], ["--max-gib", "greater than 0"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
)
def test_a_bad_option_is_named_without_a_traceback(arguments, parts, tmp_path):
    result = call("bench", *arguments, "--output", tmp_path)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert all(part in result.output for part in parts), result.output
    assert list(tmp_path.iterdir()) == []


def test_a_missing_chart_library_is_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    for command in (["bench", *SMALL], ["tour"]):
        result = call(*command, "--output", tmp_path)
        assert result.exit_code == 2
        assert "pip install 'linattn[report]'" in result.output
        assert list(tmp_path.iterdir()) == []
    assert call("bench", *SMALL, "--output", tmp_path, "--no-chart").exit_code == 0


def test_the_command_line_loads_no_charts_and_no_profiler():
    code = "import sys, linattn.lab.cli.main; print([m for m in ('matplotlib', 'accelerate') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
