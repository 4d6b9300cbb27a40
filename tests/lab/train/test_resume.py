"""A run that was killed, at any moment, and started again ends like one that was not: to the last bit."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.lab.train.small_run import CONFIG, SmallBatches, create_net, log_without_seconds, run

from linattn.support.checkpoint import ResumeError

PROGRAM = [sys.executable, "-m", "tests.lab.train.small_run"]
ROOT = Path(__file__).parents[3]
NEVER, ALWAYS = 1e9, 1e-9
# seconds between checkpoints inside an epoch, and when the kill comes
MOMENTS = {
    "before the first checkpoint": (NEVER, "step:0:2"),
    "between two epochs' checkpoints": (NEVER, "step:1:3"),
    "inside the first epoch, after a checkpoint in it": (ALWAYS, "step:0:4"),
    "inside a later epoch, after a checkpoint in it": (ALWAYS, "step:2:5"),
    "after a checkpoint, before its line in the log": (NEVER, "log:1"),
    "while a checkpoint is written": (NEVER, "half:1"),
    "after the last checkpoint, before the weights": (NEVER, "log:2"),
    "after the weights, before the result": (NEVER, "result"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """For each moment the folder that the killed run left."""
    folders = {name: tmp_path_factory.mktemp("killed") for name in MOMENTS}
    jobs = [(str(folders[name]), *MOMENTS[name]) for name in MOMENTS]
    subprocess.run([*PROGRAM, json.dumps(jobs)], cwd=ROOT, check=True)
    return folders


def weights_of(folder):
    return torch.load(folder / "weights.pt", weights_only=True)


def assert_same_end(folder, whole):
    ours, theirs = weights_of(folder), weights_of(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert log_without_seconds(folder) == log_without_seconds(whole)
    assert sorted(path.name for path in folder.iterdir()) == ["log.jsonl", "result.json", "weights.pt"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_ends_the_same(moment, killed, whole):
    folder = killed[moment]
    assert not (folder / "result.json").exists()
    assert (folder / "checkpoint.pt").exists() == (moment != "before the first checkpoint")
    run(folder)
    assert_same_end(folder, whole)


def stopped_in_epoch(folder, epoch, step=3, error=KeyboardInterrupt, config=CONFIG):
    class Stopping(SmallBatches):
        def train(self, current, first_step=0):
            for number, batch in enumerate(super().train(current, first_step), first_step):
                if (current, number) == (epoch, step):
                    raise error
                yield batch

    with pytest.raises(error):
        run(folder, config, batches=Stopping(config))


def test_ctrl_c_keeps_finished_epochs_and_lines_beyond_the_checkpoint_are_dropped(tmp_path, whole):
    stopped_in_epoch(tmp_path, 2)
    log = tmp_path / "log.jsonl"
    assert len(log_without_seconds(tmp_path)) == 2
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines, lines[-1].replace('"epoch": 1', '"epoch": 2'), '{"epoch": 3, "lr']))
    run(tmp_path)
    assert_same_end(tmp_path, whole)


def test_seconds_before_the_stop_count(tmp_path):
    stopped_in_epoch(tmp_path, 1, config=replace(CONFIG, checkpoint_seconds=ALWAYS))
    path = tmp_path / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["seconds"] > 0
    torch.save({**checkpoint, "seconds": 100.0}, path)
    _, result = run(tmp_path)
    assert 100 < result.epochs[1].seconds < 110
    assert result.seconds == sum(record.seconds for record in result.epochs)


def test_a_finished_run_is_returned_without_training(whole):
    class NoBatches(SmallBatches):
        def train(self, epoch, first_step=0):
            raise AssertionError("nothing is left to train")

        test = train

    before = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    net, result = run(whole, net=create_net(seed=99), batches=NoBatches())
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before
    assert all(torch.equal(value, weights_of(whole)[name]) for name, value in net.state_dict().items())
    assert not net.training
    content = json.loads((whole / "result.json").read_text())
    assert [content["top1"], content["seconds"]] == [result.top1, result.seconds]
    assert len(result.epochs) == CONFIG.epochs


@pytest.mark.parametrize("finished", [False, True])
def test_another_config_is_refused_and_named(tmp_path, whole, finished):
    folder = whole
    if not finished:
        folder = tmp_path
        stopped_in_epoch(folder, 1)
    with pytest.raises(ResumeError, match=r"epochs \(was 3, is 4\), lr \(was 0.01, is 0.1\)"):
        run(folder, replace(CONFIG, epochs=4, lr=0.1))
    batches = SmallBatches()
    batches.steps_per_epoch = 5
    with pytest.raises(ResumeError, match="steps_per_epoch"):
        run(folder, batches=batches)


def test_two_processes_train_like_one(tmp_path):
    """The same images in each step, half in each process: only the order of the sums differs."""
    one, two = tmp_path / "one", tmp_path / "two"
    batches = SmallBatches(noise=0)
    run(one, net=create_net(dropout=0), batches=batches)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}  # fmt: skip
    processes = [
        subprocess.Popen([*PROGRAM, "several", str(two)], cwd=ROOT, env={**common, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    ours, theirs = weights_of(two), weights_of(one)
    # Adam divides by the size of the gradient: a relative error of a few eps in it moves a weight by as many eps lr a
    # step, in the 18 steps of the run; 4 eps for the sums over 8 images.
    steps = CONFIG.epochs * batches.steps_per_epoch
    tolerance = 4 * torch.finfo(torch.float32).eps * steps * (1 + max(w.abs().max() for w in theirs.values()))
    for name, weight in theirs.items():
        assert (ours[name] - weight).abs().max() <= tolerance, name
    for a, b in zip(log_without_seconds(two), log_without_seconds(one), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
