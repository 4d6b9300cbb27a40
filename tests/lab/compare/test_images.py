"""Comparisons on few images: what they report, on which data, and how they go on after an end at any moment."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from linattn.lab.cases import case_path
from linattn.lab.compare import images
from linattn.lab.compare.findings import Findings
from linattn.lab.compare.images import CompareImages
from linattn.lab.compare.page import Report
from linattn.lab.screen import Screen
from linattn.support.options import OptionError

pytestmark = pytest.mark.usefixtures("few_images")
SMALL = CompareImages(
    mechanisms=("softmax", "relu"), seeds=2, lr=(3e-3,), epochs=2, batch_size=32, warmup_epochs=1, size="digits",
    patch_size=4, depth=1, device="cpu", jobs=1,
)  # fmt: skip


def trained(config, name, data, seed=0):
    """The model of a run, with its stored weights."""
    model = config.model(name, data, seed)
    case = config.case("run", name, seed=seed, lr=3e-3, validation=False)
    weights = case_path(config.folder / "cases", case) / "weights.pt"
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model


def accuracy(model, data):
    mean, std = (x.float().view(1, -1, 1, 1) for x in data.mean_std())
    with torch.no_grad():
        found = model.eval()((data.test.images / 255 - mean) / std).argmax(1)
    return 100 * (found == data.test.labels).double().mean().item()


def test_a_comparison_writes_what_it_found(tmp_path, few_images, compared):
    config = replace(SMALL, output=tmp_path)
    code, _, found = compared(config)
    assert code == 0
    assert list(found["run"]) == [("softmax", 0), ("relu", 0), ("softmax", 1), ("relu", 1)]
    for (name, seed), row in found["run"].items():
        assert row["score"] == pytest.approx(accuracy(trained(config, name, few_images, seed), few_images))
        assert [record["round"] for record in row["records"]] == [1, 2]
    softmax, relu = found["cost"]["softmax", 0], found["cost"]["relu", 0]
    assert relu["flops"] != softmax["flops"]
    assert len(relu["images_per_second_train"]) == 2
    assert [len(found["attention"][name, 0]["layers"]) for name in ("softmax", "relu")] == [1, 1]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"results.csv", "report.html", "examples.json", "accuracy-speed.png", "attention-maps.png"} <= names
    shown = json.loads((tmp_path / "examples.json").read_text())["images"]
    assert len({image["label"] for image in shown}) == len(shown) == 4, "of different classes"
    assert set(shown[0]["maps"]) == {"softmax", "relu"}
    assert sum(map(sum, shown[0]["maps"]["softmax"])) == pytest.approx(1, abs=1e-2)
    page = (tmp_path / "report.html").read_bytes()
    Report(folder=tmp_path).run(Screen(quiet=True))
    assert (tmp_path / "report.html").read_bytes() == page


def test_statistics_are_of_all_classes_in_turn(few_images):
    """Class folders are sorted: the first images are all of one class."""
    order = few_images.test.labels.argsort()
    data = replace(few_images, test=few_images.test.take(order))
    shown, labels = images.test_images(data, SMALL, 20)
    assert labels.bincount().tolist() == [2] * 10
    assert sorted(labels[:10].tolist()) == list(range(10))
    assert shown.shape == (20, 1, 8, 8)


def test_learning_rates_are_chosen_on_held_out_training_images(tmp_path, few_images, compared, monkeypatch):
    seen, real = [], images.create_batches
    monkeypatch.setattr(images, "create_batches", lambda data, *rest: seen.append(data) or real(data, *rest))
    config = replace(SMALL, mechanisms=("relu",), seeds=1, lr=(1e-3, 1e-6), output=tmp_path)
    _, _, found = compared(config)
    assert found["run"]["relu", 0]["lr"] == 1e-3
    held = images.loaded("digits", None, True)
    test_images = {image.numpy().tobytes() for image in few_images.test.images}
    assert not test_images & {image.numpy().tobytes() for image in held.test.images}
    assert len(held.train) + len(held.test) == len(few_images.train)
    trained = [len(data.train) for data in seen[1:4]]  # the first checks the options
    assert trained == [len(held.train)] * 2 + [len(few_images.train)]


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"mechanisms": ("zeros", "taylor", "window")}, "mechanisms"),  # causal alone
        ({"stages": "llll"}, "stages"),
        ({"warmup_epochs": 3}, "warmup_epochs"),
        ({"energy_loss": 0.1}, "energy_loss"),
        ({"crop_padding": 8}, "crop_padding"),
        ({"graphs": True}, "graphs"),
        ({"option": {"relu.alhpa": 4}}, "option"),
        ({"mechanisms": ("pola",), "option": {"alpha": -1}}, "option"),
        ({"mechanisms": ("pola",), "option": {"pola.causal": True}}, "option"),
        ({"mechanisms": ("pola",), "option": {"pola.head_dim": 1}, "preset": "nala"}, "option"),
        ({"mechanisms": ("pola",), "option": {"pola.num_heads": 1}, "host": "pyramid", "size": "xt", "patch_size": None,
          "depth": None}, "option"),
        ({"option": {"nala.power": 3}}, "option"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named_before_anything_is_written(tmp_path, changes, option):
    with pytest.raises(OptionError) as error:
        replace(SMALL, output=tmp_path / "c", **changes).run(Screen(quiet=True))
    assert error.value.option == option
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("mechanism", ["mirror", "performer", "pola"])
@pytest.mark.parametrize("changes", [{"local": "channel"}, {"preset": "pola"}, {"preset": "nala"}])
def test_what_mechanisms_do_not_own_starts_the_same_beside_each(few_images, mechanism, changes):
    """mirror and performer draw random numbers for themselves, which must not shift those of the host."""
    host = replace(SMALL, mechanisms=("relu", mechanism), depth=2, **changes)
    plain, again, seeded, other = (
        dict(host.model(name, few_images, seed).named_parameters())
        for name, seed in (("relu", 3), ("relu", 3), ("relu", 4), (mechanism, 3))
    )
    assert {name for name in other if ".mechanism." not in name} == set(plain)
    assert all(torch.equal(parameter, other[name]) for name, parameter in plain.items())
    assert all(torch.equal(parameter, again[name]) for name, parameter in plain.items())
    assert not torch.equal(plain["head.weight"], seeded["head.weight"])


def test_options_reach_the_mechanism_of_either_host(few_images, tmp_path, compared):
    pola = replace(SMALL, mechanisms=("relu", "pola"), option={"pola.alpha": 2.0}, local="channel")
    attention = pola.model("pola", few_images, 0).blocks[0].attn
    assert (attention.mechanism.alpha, attention.options.local) == (2.0, "channel")
    pyramid = replace(pola, host="pyramid", size="xt", patch_size=None, depth=None)
    stages = pyramid.model("pola", few_images, 0).stages
    assert [getattr(stage.blocks[0].attn.mechanism, "alpha", None) for stage in stages] == [2.0, 2.0, None, None]
    _, _, found = compared(replace(pola, epochs=1, seeds=1, output=tmp_path))
    assert [found["run"][name, 0].get("options") for name in ("relu", "pola")] == [None, {"alpha": 2.0}]
    assert "<small>alpha=2.0</small>" in (tmp_path / "report.html").read_text()


def command(archive, folder, jobs=1):
    words = ["--mechanisms", "relu,elu", "--seeds", "1", "--epochs", "2", "--lr", "3e-3", "--size", "digits"]
    words += ["--depth", "1", "--patch-size", "4", "--data", archive, "--batch-size", "32", "--device", "cpu"]
    return [sys.executable, "-m", "linattn", "compare", *words, "--jobs", str(jobs), "--output", str(folder)]


def numbers(folder):
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [(r["mechanism"], r["score"], [e["train_loss"] for e in r["records"]]) for r in rows if r["kind"] == "run"]


def test_killed_and_in_several_processes_a_comparison_ends_as_unbroken_in_one(tmp_path, archive):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    process = subprocess.Popen(command(archive, tmp_path / "killed", 2), start_new_session=True, **quiet)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("cases/*/log.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)  # its workers too: the same command goes on at once
    process.wait()
    for folder, jobs in (("killed", 2), ("whole", 1)):
        assert subprocess.run(command(archive, tmp_path / folder, jobs), check=False, **quiet).returncode == 0
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob(".*-????????.*")), "nothing half written is left"


def test_speeds_have_a_spread():
    for given, expected in (([3.0, 1.0, 2.0], (2.0, 1.0, 3.0)), (5.0, (5.0, 5.0, 5.0)), (None, None)):
        assert Findings({}, [{"kind": "cost", "mechanism": "relu", "speed": given}]).spread("relu", "speed") == expected
