"""A run that was killed and started again ends like one that was not: to the last bit."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.lab.train.text.small_text import CONFIG, HOST, TASK, log_without_seconds, run

from linattn.lab.tasks.text import text_task
from linattn.support.checkpoint import ResumeError

ROOT = Path(__file__).parents[4]
NEVER, ALWAYS = 1e9, 1e-9
# seconds between checkpoints, and before which batch the kill comes
MOMENTS = {
    "before the first checkpoint": (NEVER, 2),
    "in the middle of a round, after a checkpoint in it": (ALWAYS, 5),
    "in a later round, after the checkpoint of an evaluation": (NEVER, 4),
    "after a checkpoint, before its line in the log": (NEVER, "log"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp("killed") for name in MOMENTS}
    jobs = [(str(folders[name]), *MOMENTS[name]) for name in MOMENTS]
    subprocess.run([sys.executable, "-m", "tests.lab.train.text.small_text", json.dumps(jobs)], cwd=ROOT, check=True)
    return folders


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_ends_the_same(moment, killed, whole):
    folder = killed[moment]
    assert not (folder / "result.json").exists()
    assert (folder / "checkpoint.pt").exists() == (moment != "before the first checkpoint")
    if moment.startswith("in the middle"):
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["step"] == 2
    run(folder)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(whole / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert log_without_seconds(folder) == log_without_seconds(whole)
    assert [line["step"] for line in log_without_seconds(folder)] == [3, 6, 7]
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "generation_config.json", "log.jsonl", "model.safetensors", "result.json"}


def test_a_finished_run_is_returned_without_training(whole, monkeypatch):
    monkeypatch.setattr(type(TASK), "train_batch", lambda *_: pytest.fail("nothing is left to train"))
    model, result = run(whole)
    weights = load_file(whole / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert result.score == json.loads((whole / "result.json").read_text())["score"]


def test_options_that_a_model_does_not_print_tell_runs_apart(tmp_path):
    host = replace(HOST, mechanism="mlstm")
    run(tmp_path, host=host)
    for name, value in (("soft_cap", 15.0), ("input_bias", -5.0)):
        with pytest.raises(ResumeError, match=rf"options \(was \[\{{\}}\], is \[\{{'{name}'"):
            run(tmp_path, host=replace(host, option={f"mlstm.{name}": value}))


def test_other_data_under_the_same_name_are_noticed(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one text and no other. " * 40)
    task = {"data": str(text), "length": 16}
    run(tmp_path / "run", task=text_task("text", **task))
    text.write_text("no other and one text. " * 40)
    with pytest.raises(ResumeError, match=r"another task .*content"):
        run(tmp_path / "run", task=text_task("text", **task))
    text.rename(tmp_path / "other.txt").write_text("one text and no other. " * 40)
    run(tmp_path / "run", task=text_task("text", data=str(tmp_path / "other.txt"), length=16))  # the same, elsewhere


def test_weights_may_be_left_out(whole, tmp_path, monkeypatch):
    """The result and the log are there, a finished run is still known, and nobody gets weights that are not its own."""
    _, result = run(tmp_path, keep_weights=False)
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "result.json"}
    assert log_without_seconds(tmp_path) == log_without_seconds(whole)
    monkeypatch.setattr(type(TASK), "train_batch", lambda *_: pytest.fail("nothing is left to train"))
    assert run(tmp_path, keep_weights=False)[1] == result
    with pytest.raises(ResumeError, match="holds a finished run without its weights"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": replace(CONFIG, lr=0.02)}, r"lr \(was 0.01, is 0.02\)"),
        ({"config": replace(CONFIG, schedule="linear")}, "schedule"),
        ({"config": replace(CONFIG, eps=1e-6)}, "eps"),
        ({"task": replace(TASK, pairs=3)}, "task"),
        ({"host": replace(HOST, mechanism="relu")}, "model"),
        ({"start": "elsewhere"}, "start"),
    ],
)
def test_another_run_is_refused_and_named(whole, changes, words):
    with pytest.raises(ResumeError, match=words):
        run(whole, **changes)
