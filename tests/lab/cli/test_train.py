import json
import signal
import subprocess
import sys
import time

import pytest
import torch
import typer
from typer.testing import CliRunner

from linattn.lab.cli.train import images
from linattn.lab.train import screen
from linattn.lab.train.records import DivergedError
from linattn.support import extras

APP = typer.Typer()
APP.command()(images)
QUICK = ["--patch-size", "4", "--batch-size", "128", "--device", "cpu", "--epochs", "2"]


def call(*arguments):
    return CliRunner().invoke(APP, [str(a) for a in arguments], env={"COLUMNS": "160", "TERM": "dumb"})


def test_it_trains_keeps_and_shows(tmp_path):
    result = call(
        *QUICK, "--mechanism", "nala", "--lr", "0.01", "--clip-norm", "0", "--seed", "3", "--output", tmp_path
    )
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "result.json").read_text())
    assert f"nala: {told['top1']:.2f} %" in result.output
    assert "weights.pt" in result.output
    assert told["fingerprint"]["lr"] == 0.01
    assert told["fingerprint"]["clip_norm"] is None
    assert told["fingerprint"]["seed"] == 3
    assert told["fingerprint"]["label_smoothing"] == 0.1, "not given: the recipe's"
    assert [record["epoch"] for record in told["epochs"]] == [0, 1]
    # started again: the same words at once, and nothing is written
    before = (tmp_path / "result.json").stat().st_mtime_ns
    again = call(*QUICK, "--mechanism", "nala", "--lr", "0.01", "--clip-norm", "0", "--seed", "3", "--output", tmp_path)
    assert again.output == result.output
    assert (tmp_path / "result.json").stat().st_mtime_ns == before
    other = call(*QUICK, "--mechanism", "relu", "--lr", "0.02", "--clip-norm", "0", "--seed", "3", "--output", tmp_path)
    assert other.exit_code == 2
    assert all(word in other.output for word in ("--output", "lr (was 0.01, is 0.02)", "model"))


def test_a_run_with_other_options_is_not_gone_on_with(tmp_path):
    arguments = [*QUICK, "--mechanism", "pola", "--epochs", "1", "--output", tmp_path]
    plain = call(*arguments)
    assert plain.exit_code == 0, plain.output
    assert "options" not in json.loads((tmp_path / "result.json").read_text())["fingerprint"], "as of old"
    other = call(*arguments, "--option", "pola.alpha=2")
    assert other.exit_code == 2
    assert all(word in other.output for word in ("--output", "options (was None, is {'alpha': 2})"))
    arguments[-1] = tmp_path / "other"
    told = call(*arguments, "--option", "alpha=2")
    assert told.exit_code == 0, told.output
    assert "pola alpha=2: " in told.output
    assert "options (was {'alpha': 2}, is None)" in call(*arguments).output


def test_ctrl_c_tells_that_the_same_command_goes_on(tmp_path):
    """A real interrupt of a real process, in an epoch after the first."""
    folder = tmp_path / "run"
    arguments = ["--patch-size", "4", "--device", "cpu", "--epochs", "100000", "--output", str(folder)]
    # A shell lets what it starts in the background ignore interrupts, and children inherit that: as at a terminal here.
    code = (
        "import signal, sys, typer; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from linattn.lab.cli.train import images; sys.argv[1:] = {arguments!r}; typer.run(images)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        while not (folder / "log.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "the same command goes on" in " ".join(output.split())
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["epoch"] == len((folder / "log.jsonl").read_text().splitlines()) >= 1


def test_divergence_is_told_with_exit_code_one(tmp_path, monkeypatch):
    def diverge(*_, **__):
        raise DivergedError(3, 14, 0.5)

    monkeypatch.setattr(screen, "train", diverge)
    result = call(*QUICK, "--output", tmp_path)
    assert result.exit_code == 1
    assert "epoch 3, step 14, learning rate 0.5" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--mechanism", "nobody"], ["--mechanism", "nala"]),
        (["--data", "nowhere"], ["--data", "does not exist"]),
        (["--recipe", "secret"], ["--recipe", "digits, small_images, deit"]),
        (["--size", "huge"], ["--size", "tiny"]),
        (["--epochs", "0"], ["--epochs", "at least 1"]),
        (["--lr", "-1"], ["--lr", "above 0"]),
        (["--precision", "fp8"], ["--precision", "fp32, bf16"]),
        (["--device", "tpu"], ["--device", "cpu, cuda"]),
        (["--patch-size", "0"], ["--patch-size", ">= 1"]),
        (["--preset", "nobody"], ["--preset", "nala"]),
        (["--global-pool", "max"], ["--global-pool", "avg, token"]),
        (["--crop-padding", "8"], ["--crop-padding", "8x8"]),
        (["--rand-augment", "strong"], ["--rand-augment", "m9"]),
        (
            ["--mechanism", "relu", "--energy-loss", "0.1"],
            ["--energy-loss", "such as mirror; for others it must be 0, got 0.1"],
        ),
        (["--mechanism", "pola", "--option", "alhpa=2"], ["--option", "no option 'alhpa'", "alpha"]),
        (["--mechanism", "pola", "--option", "alpha=-2"], ["--option", "pola: alpha must be a number > 0"]),
        (["--mechanism", "pola", "--option", "nala.power=2"], ["--option", "nala.* is given"]),
    ],
)
def test_a_bad_option_is_named_without_a_traceback(arguments, parts, tmp_path):
    device = [] if "--device" in arguments else ["--device", "cpu"]
    result = call(*arguments, *device, "--output", tmp_path)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert all(part in result.output for part in parts), result.output
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    result = call(*QUICK, "--output", tmp_path)
    assert result.exit_code == 2
    assert "pip install 'linattn[train]'" in result.output
    assert list(tmp_path.iterdir()) == []
