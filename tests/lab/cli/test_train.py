"""``linattn train images``: what it says, what it keeps, and how it goes on."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from linattn.lab.command import main
from linattn.lab.train import command
from linattn.lab.train.rounds import DivergedError
from linattn.support import extras

QUICK = ["--patch-size", "4", "--batch-size", "128", "--device", "cpu", "--epochs", "2"]


@pytest.fixture
def call(capsys):
    def run(*arguments):
        code = main(["train", "images", *map(str, arguments)])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def test_it_trains_keeps_and_shows(tmp_path, call):
    arguments = [*QUICK, "--clip-norm", "0", "--seed", "3", "--output", tmp_path]
    first = [*arguments, "--mechanism", "nala", "--lr", "0.01"]
    code, output = call(*first)
    assert code == 0, output
    told = json.loads((tmp_path / "result.json").read_text())
    assert f"nala: {told['top1']:.2f} %" in output
    kept = told["fingerprint"]
    assert [kept[name] for name in ("lr", "clip_norm", "seed", "label_smoothing")] == [0.01, None, 3, 0.1]
    assert [record["epoch"] for record in told["epochs"]] == [0, 1]
    before = (tmp_path / "result.json").stat().st_mtime_ns
    assert call(*first) == (code, output), "the same words at once"
    assert (tmp_path / "result.json").stat().st_mtime_ns == before
    code, output = call(*arguments, "--lr", "0.02", "--mechanism", "relu")
    assert code == 2
    assert all(word in output for word in ("--output", "lr (was 0.01, is 0.02)", "model"))


def test_a_run_with_other_options_is_not_gone_on_with(tmp_path, call):
    arguments = [*QUICK, "--mechanism", "pola", "--output", tmp_path]
    assert call(*arguments)[0] == 0
    code, output = call(*arguments, "--option", "pola.alpha=2")
    assert code == 2
    assert all(word in output for word in ("--output", "options (was {}, is {'alpha': 2})"))
    code, output = call(*arguments[:-1], tmp_path / "other", "--option", "alpha=2", "--json")
    assert code == 0
    assert 0 <= json.loads(output)["top1"] <= 100


def test_ctrl_c_tells_that_the_same_command_goes_on(tmp_path):
    """A real interrupt of a real process, in an epoch after the first."""
    folder = tmp_path / "run"
    words = ["train", "images", "--patch-size", "4", "--device", "cpu", "--epochs", "100000", "--output", str(folder)]
    # A shell lets what it starts in the background ignore interrupts, and children inherit that: as at a terminal here.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from linattn.lab.command import main; sys.exit(main({words!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        while not (folder / "log.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "The same command goes on" in " ".join(output.split())
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["epoch"] == len((folder / "log.jsonl").read_text().splitlines()) >= 1


def test_divergence_is_told_with_exit_code_one(tmp_path, call, monkeypatch):
    def diverge(*_, **__):
        raise DivergedError("the training loss is not finite: epoch 3, step 14, learning rate 0.5")

    monkeypatch.setattr(command, "train", diverge)
    code, output = call(*QUICK, "--output", tmp_path)
    assert code == 1
    assert "epoch 3, step 14, learning rate 0.5" in output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--mechanism", "nobody"], ["--mechanism", "nala"]),
        (["--data", "nowhere"], ["--data", "does not exist"]),
        (["--recipe", "secret"], ["--recipe", "digits, small_images, deit"]),
        (["--size", "huge"], ["--size", "tiny"]),
        (["--epochs", "0"], ["--epochs", "at least 1"]),
        (["--device", "tpu"], ["--device", "cpu, cuda"]),
        (["--patch-size", "0"], ["--patch-size", "at least 1"]),
        (["--preset", "nobody"], ["--preset", "nala"]),
        (["--global-pool", "max"], ["--global-pool", "avg, token"]),
        (["--crop-padding", "8"], ["--crop-padding", "8x8"]),
        (["--graphs"], ["--graphs", "need a GPU"]),
        (["--mechanism", "relu", "--energy-loss", "0.1"], ["--energy-loss", "such as mirror"]),
        (["--mechanism", "pola", "--option", "alhpa=2"], ["--option", "no option 'alhpa'", "alpha"]),
        (["--mechanism", "pola", "--option", "alpha=-2"], ["--option", "pola: alpha must be"]),
        (["--mechanism", "pola", "--option", "nala.power=2"], ["--option", "nala.power is given"]),
        (["--colour", "red"], ["--colour"]),
    ],
)
def test_a_bad_option_is_named_before_any_work(arguments, parts, tmp_path, call):
    device = [] if "--device" in arguments else ["--device", "cpu"]
    code, output = call(*arguments, *device, "--output", tmp_path)
    assert code == 2, output
    assert all(part in output for part in parts), output
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_told_before_any_work(tmp_path, call, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    code, output = call(*QUICK, "--output", tmp_path)
    assert code == 2
    assert "pip install 'linattn[lab]'" in output
    assert list(tmp_path.iterdir()) == []
