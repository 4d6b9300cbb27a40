"""A comparison that is interrupted, killed, joined by more, or spread over processes ends as one that is not."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from tests.lab.compare.small_comparison import TRAIN, config_for, results_of, run
from typer.testing import CliRunner

from linattn.lab.cli.main import app
from linattn.lab.compare import runner, screen, workers
from linattn.lab.compare.cells import CellResult, final_cells
from linattn.lab.compare.compare import compare, create_subject
from linattn.lab.compare.results import Results
from linattn.support.options import OptionError

pytestmark = pytest.mark.usefixtures("few_images")


def run_command(arguments: list[str]) -> None:
    """The command in this process and in one thread, as each of its own processes has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        done = CliRunner().invoke(app, [*arguments, "--jobs", "1"])
    finally:
        torch.set_num_threads(before)
    assert done.exit_code == 0, done.output


def test_compiled_runs_of_one_mechanism_share_a_process(tmp_path, monkeypatch):
    """What a process has compiled for the first seed serves the others; uncompiled, any process takes any run."""
    plain = config_for(tmp_path, mechanisms=("softmax", "relu", "elu"), jobs=2)
    for config, sizes in ((plain, [2]), (replace(plain, train=replace(TRAIN, compile=True)), [1, 1])):
        made, given = [], []

        class Pool:
            def __init__(self, size, places=given, **_):
                self.size, self.places = size, places
                made.append(self)  # noqa: B023

            def submit(self, function, cell):
                self.places.append((made.index(self), cell.mechanism))  # noqa: B023
                future = Future()
                future.set_result(CellResult(cell, "done"))
                return future

            def shutdown(self):
                pass

        monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
        cells = final_cells(config, dict.fromkeys(config.mechanisms, 1e-3))
        with workers.workers(config) as in_workers:
            done = list(in_workers(cells[:2], lambda _: None)) + list(in_workers(cells[2:], lambda _: None))
        assert len(done) == len(cells)
        assert {result.cell for result in done} == set(cells), "the same processes serve one list after another"
        assert [pool.size for pool in made] == sizes
        homes = {name: {place for place, other in given if other == name} for name in config.mechanisms}
        assert all(len(places) == 1 for places in homes.values())
        assert len(set(map(min, homes.values()))) == len(sizes)


def test_the_time_that_is_left_is_told_by_runs_of_this_call(tmp_path, monkeypatch):
    """What an earlier call has finished takes no time: counted in, it would promise the rest within seconds."""
    config = config_for(tmp_path, mechanisms=("softmax", "relu", "elu"))  # two seeds: 6 runs
    results = Results(config, create_subject(config), {})
    cells = final_cells(config, dict.fromkeys(config.mechanisms, 3e-3))
    for cell in cells[:3]:
        folder = cell.folder(config.output)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text("{}")
    now = [0.0]
    monkeypatch.setattr(screen, "monotonic", lambda: now[0])
    text = StringIO()
    shown = screen.Screen(results, Console(file=text, width=160), len(cells))
    shown.begin(cells, config.output)
    for number, seconds in ((0, 1.0), (3, 101.0), (1, 102.0), (2, 102.0), (4, 202.0), (5, 302.0)):
        now[0] = seconds
        shown.on_result(CellResult(cells[number], "done", score=50.0, train_seconds=90.0))
    assert [line.split("50.00 %")[1] for line in text.getvalue().splitlines()] == [
        ", trained earlier in 1 min 30 s",
        ", trained in 1 min 30 s, about 3 min 22 s left",  # two runs to come
        ", trained earlier in 1 min 30 s, about 3 min 24 s left",
        ", trained earlier in 1 min 30 s, about 3 min 24 s left",
        ", trained in 1 min 30 s, about 1 min 41 s left",
        ", trained in 1 min 30 s",
    ]


def test_an_interrupted_comparison_goes_on_where_it_stopped(tmp_path, monkeypatch):
    whole, parts = config_for(tmp_path / "whole"), config_for(tmp_path / "parts")
    run(whole)
    trained = []
    real = runner.train

    def train(*args, **kwargs):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(args[3])
        return real(*args, **kwargs)

    monkeypatch.setattr(runner, "train", train)
    code, text = run(parts)
    assert code == 130
    assert "The same command goes on" in text
    assert results_of(parts)["meta"]["finished"] is False
    assert [row["status"] for row in results_of(parts)["rows"]] == ["done", "done", "waiting", "waiting"]
    monkeypatch.setattr(runner, "train", real)
    assert run(parts)[0] == 0

    def numbers(config):
        return [(r["mechanism"], r["top1"], [e["train_loss"] for e in r["epochs"]]) for r in results_of(config)["rows"]]

    assert numbers(parts) == numbers(whole)


def test_a_killed_comparison_keeps_what_was_finished(tmp_path, archive):
    """SIGKILL leaves no time to tidy up: what the first process finished must be there as it was."""
    arguments = ["compare", "--mechanisms", "relu,elu", "--seeds", "1"]
    arguments += ["--epochs", "1", "--lr", "3e-3", "--size", "digits", "--depth", "1", "--patch-size", "4"]
    arguments += ["--data", archive, "--batch-size", "32", "--output", str(tmp_path / "c")]
    first = tmp_path / "c" / "runs" / "relu" / "lr-0.003-seed-0" / "result.json"
    command = [sys.executable, "-m", "linattn.lab.cli.main", *arguments]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **silent, start_new_session=True)
    deadline = time.monotonic() + 120
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)  # its workers too: the same command goes on here at once
    process.wait()
    before = first.read_bytes(), first.stat().st_mtime_ns
    run_command(arguments)
    assert (first.read_bytes(), first.stat().st_mtime_ns) == before
    rows = json.loads((tmp_path / "c" / "results.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["done", "done"]


def test_runs_in_several_processes_are_those_of_one(tmp_path, archive):
    def numbers(folder):
        rows = json.loads((folder / "results.json").read_text())["rows"]
        return [(r["mechanism"], r["status"], r["top1"], [e["train_loss"] for e in r["epochs"]]) for r in rows]

    arguments = ["compare", "--mechanisms", "relu,elu", "--seeds", "1", "--epochs", "1", "--depth", "1"]
    arguments += ["--size", "digits", "--patch-size", "4", "--lr", "3e-3", "--data", archive, "--batch-size", "32"]
    run_command([*arguments, "--output", str(tmp_path / "1")])
    command = [sys.executable, "-m", "linattn.lab.cli.main", *arguments, "--jobs", "2", "--output", tmp_path / "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "1") == numbers(tmp_path / "2")


def test_more_seeds_and_mechanisms_join_and_another_budget_does_not(tmp_path):
    config = config_for(tmp_path / "c", mechanisms=("relu",), seeds=1)
    run(config)
    weights = config.output / "runs/relu/lr-0.003-seed-0/weights.pt"
    stamp = weights.stat().st_mtime_ns
    assert run(replace(config, mechanisms=("relu", "elu"), seeds=2))[0] == 0
    assert weights.stat().st_mtime_ns == stamp
    with pytest.raises(OptionError, match="epochs was 2, now 3"):
        compare(replace(config, train=replace(TRAIN, epochs=3)), Console(file=StringIO()))
