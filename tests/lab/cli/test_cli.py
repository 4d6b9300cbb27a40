"""The command line as a whole: unknown words are named, nothing is written, little is imported."""

import subprocess
import sys

import pytest
import torch

import linattn
from linattn.lab.command import main
from linattn.mechanisms.registry import list_mechanisms


@pytest.fixture
def call(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words):
        code = main(list(words))
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def test_version(call):
    assert call("--version") == (0, f"{linattn.__version__}\n")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["compare", "--colour", "red"], ["--colour"]),
        (["compare", "--seeds", "few"], ["--seeds", "few"]),
        (["compare", "--seeds", "0"], ["--seeds", "at least 1"]),
        (["compare", "--mechanisms", "nobody"], ["--mechanisms", "nala"]),
        (["compare", "conversion", "--share", "2"], ["--share", "at most 1"]),
        (["compare", "--task", "nothing"], ["--task", "mqar"]),
        (["lab", "icl", "--families", "magic"], ["--families", "drift"]),
        (["lab", "entropy", "--device", "tpu"], ["--device", "cpu, cuda"]),
        (["bench", "--lengths", "64,many"], ["--lengths"]),
        (["report", "nowhere"], ["FOLDER", "results.json"]),
    ],
)
def test_a_bad_word_is_named_and_nothing_is_written(words, parts, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, shown = call(*words)
    assert code == 2, shown
    assert all(part in shown for part in parts), shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"meta": {}, "rows": []}'])
def test_a_folder_without_a_comparison_is_named(content, call, tmp_path):
    (tmp_path / "results.json").write_text(content)
    code, shown = call("report", str(tmp_path))
    assert code == 2
    assert "FOLDER" in shown


def test_mechanisms_shows_the_registry(call):
    code, shown = call("mechanisms")
    assert code == 0
    assert all(name in shown for name in list_mechanisms())


def test_doctor_is_short_and_says_what_auto_chooses(call):
    code, shown = call("doctor")
    assert code == 0
    assert torch.__version__ in shown
    assert len(shown.splitlines()) < 40


def test_the_command_line_loads_no_charts_and_no_profiler():
    code = "import sys, linattn.lab.command; print([m for m in ('matplotlib', 'accelerate') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
