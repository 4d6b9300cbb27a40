"""A comparison end to end, on few images."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.lab.compare.small_comparison import HOST, TRAIN, config_for, results_of, run

from linattn.lab.compare import compare as main
from linattn.lab.compare import host, measure, runner
from linattn.lab.compare.cells import CellResult, best_lrs, final_cells, sweep_cells
from linattn.lab.compare.compare import compare
from linattn.lab.compare.host import create_host
from linattn.lab.compare.images import Images
from linattn.lab.tasks import load_images
from linattn.models.vision import create_vit
from linattn.support.options import OptionError

pytestmark = pytest.mark.usefixtures("few_images")


def test_a_comparison_writes_what_it_found(tmp_path):
    config = config_for(tmp_path / "c")
    code, text = run(config)
    results = results_of(config)
    assert code == 0
    assert results["meta"]["finished"] is True
    assert [(row["mechanism"], row["seed"]) for row in results["rows"]] == [
        ("softmax", 0), ("relu", 0), ("softmax", 1), ("relu", 1),
    ]  # fmt: skip
    for entry in results["mechanisms"]:
        own = [row["top1"] for row in results["rows"] if row["mechanism"] == entry["mechanism"]]
        assert entry["top1_mean"] == pytest.approx(sum(own) / 2)
        assert entry["top1_std"] == pytest.approx(abs(own[0] - own[1]) / 2**0.5)
        assert entry["images_per_second_train"] > 0
        assert len(entry["layers"]) == 1
    softmax, relu = results["mechanisms"]
    assert softmax["entropy_gap"] == 0
    assert relu["entropy_gap"] == pytest.approx(relu["entropy"] - softmax["entropy"])
    assert relu["flops"] != softmax["flops"]
    assert f"{relu['top1_mean']:.2f}" in text
    names = {path.name for path in config.output.iterdir()}
    assert {"results.json", "results.csv", "runs.csv", "report.html", "charts", "examples.json"} <= names
    examples = json.loads((config.output / "examples.json").read_text())
    assert set(examples["images"][0]["maps"]) == {"softmax", "relu"}
    assert sum(map(sum, examples["images"][0]["maps"]["softmax"])) == pytest.approx(1, abs=1e-2)


def test_the_reported_accuracy_is_that_of_the_stored_weights(tmp_path):
    config = config_for(tmp_path / "c", mechanisms=("relu",), seeds=1)
    run(config)
    row = results_of(config)["rows"][0]
    data = main.load_images()
    model = create_host("relu", HOST, data, 0)
    model.load_state_dict(torch.load(config.output / "runs/relu/lr-0.003-seed-0/weights.pt", weights_only=True))
    mean, std = (x.float().view(1, -1, 1, 1) for x in data.mean_std())
    with torch.no_grad():
        found = model.eval()((data.test.images / 255 - mean) / std).argmax(1)
    assert row["top1"] == pytest.approx(100 * (found == data.test.labels).double().mean().item())


def test_a_failing_mechanism_leaves_the_others_alone(tmp_path, monkeypatch):
    real = runner.create_host

    def broken(mechanism, *args):
        if mechanism == "relu":
            raise RuntimeError("out of order")
        return real(mechanism, *args)

    monkeypatch.setattr(runner, "create_host", broken)
    config = config_for(tmp_path / "c", seeds=1)
    code, text = run(config)
    assert code == 1
    assert "failed: relu, seed 0: out of order" in text
    assert [row["status"] for row in results_of(config)["rows"]] == ["done", "failed"]
    softmax, relu = results_of(config)["mechanisms"]
    assert relu["top1_mean"] is None
    assert "parameters" not in relu
    assert softmax["parameters"] > 0


def test_a_mechanism_that_does_not_fit_the_host_is_named_before_any_training(tmp_path, monkeypatch):
    def refuse(size, mechanism, **options):
        if mechanism == "agent":
            raise ValueError("agents need a plane")
        return create_vit(size, mechanism, **options)

    monkeypatch.setattr(host, "create_vit", refuse)
    config = config_for(tmp_path / "c", mechanisms=("softmax", "agent"))
    with pytest.raises(OptionError, match="mechanisms: agent does not fit this host"):
        compare(config, Console(file=StringIO()))
    assert not (tmp_path / "c").exists()


def test_learning_rates_are_chosen_on_held_out_training_images(tmp_path, monkeypatch):
    config = config_for(tmp_path / "c", mechanisms=("relu",), seeds=1, lrs=(1e-3, 1e-6))
    data, seen = main.load_images(), []
    real = runner.create_batches

    def watch(data, *args):
        seen.append(data)
        return real(data, *args)

    monkeypatch.setattr(runner, "create_batches", watch)
    run(config)
    entry = results_of(config)["mechanisms"][0]
    assert {tried["lr"] for tried in entry["sweep"]} == {1e-6, 1e-3}
    assert entry["lr"] == max(entry["sweep"], key=lambda tried: (tried["top1"], -tried["lr"]))["lr"]
    test_images = {image.numpy().tobytes() for image in data.test.images}
    for used in seen[:2]:
        assert not test_images & {image.numpy().tobytes() for image in used.test.images}
        assert len(used.train) + len(used.test) == len(data.train)
    assert len(seen) == 3
    assert len(seen[2].train) == len(data.train)


def test_the_better_lr_wins_and_of_equals_the_smaller():
    config = config_for(Path(), mechanisms=("relu", "elu"), lrs=(3e-3, 1e-3, 1e-2))
    cells = sweep_cells(config)
    assert [(cell.mechanism, cell.lr) for cell in cells[:3]] == [("relu", 1e-3), ("relu", 3e-3), ("relu", 1e-2)]
    top1 = [50.0, 60.0, 60.0, None, 40.0, 30.0]
    swept = [CellResult(cell, "done", score=value) for cell, value in zip(cells, top1, strict=True)]
    assert best_lrs(config, swept) == {"relu": 3e-3, "elu": 3e-3}
    assert [cell.mechanism for cell in final_cells(config, best_lrs(config, swept))] == ["relu", "elu"] * 2
    compiled = replace(config, train=replace(TRAIN, compile=True))
    cells = final_cells(compiled, best_lrs(config, swept))
    assert [(cell.mechanism, cell.seed) for cell in cells] == [("relu", 0), ("relu", 1), ("elu", 0), ("elu", 1)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mechanisms": ("nope",)}, "mechanisms: must be one of"),
        ({"mechanisms": ("relu", "relu")}, "each may be named once"),
        ({"mechanisms": ()}, "name at least one"),
        ({"seeds": 0}, "seeds: must be an integer >= 1"),
        ({"lrs": (0.0, 1e-3)}, "lr: must be greater than 0"),
        ({"jobs": 0}, "jobs: must be an integer >= 1"),
        ({"host": replace(HOST, size="huge")}, "size: must be one of"),
        ({"host": replace(HOST, depth=0)}, "depth: must be an integer >= 1"),
        ({"host": replace(HOST, local="wide")}, "local: must be one of"),
        ({"train": replace(TRAIN, epochs=0)}, "epochs: must be"),
        ({"train": replace(TRAIN, energy_loss=0.1)}, "energy_loss: needs a mechanism that reports the energy"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_written(tmp_path, changes, words):
    with pytest.raises(OptionError, match=words):
        compare(config_for(tmp_path / "c", **changes), Console(file=StringIO()))
    assert not (tmp_path / "c").exists()


def test_hosts_differ_by_seed_and_by_nothing_else():
    data = load_images("digits")
    one, same, other = (create_host("nala", HOST, data, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)


@pytest.mark.parametrize("mechanism", ["mirror", "performer", "pola"])
@pytest.mark.parametrize("changes", [{"local": "channel"}, {"preset": "pola"}, {"preset": "nala"}])
def test_what_mechanisms_do_not_own_starts_the_same_beside_each(mechanism, changes):
    """mirror and performer draw random numbers for themselves, which must not shift those of the host."""
    host, data = replace(HOST, depth=2, **changes), load_images("digits")
    plain, other = (dict(create_host(name, host, data, 3).named_parameters()) for name in ("relu", mechanism))
    assert {name for name in other if ".mechanism." not in name} == set(plain)
    for name, parameter in plain.items():
        assert torch.equal(parameter, other[name]), name


def test_costs_on_a_gpu_are_taken_one_after_the_other(tmp_path, monkeypatch):
    """Compiled code of one mechanism is gone before the next is compiled; on a CPU all are timed in turns."""
    said = []
    monkeypatch.setattr(measure.torch.compiler, "reset", lambda: said.append("reset"))
    monkeypatch.setattr(measure, "compile_blocks", lambda model: said.append("compile"))
    monkeypatch.setattr(measure, "train_peak_bytes", lambda *_, **__: 1)

    def timed(models, *_, **__):
        said.append("time " + "+".join(models))
        return dict.fromkeys(models, 2.0)

    monkeypatch.setattr(measure, "throughput_in_turns", timed)
    config = config_for(tmp_path, train=replace(TRAIN, compile=True))
    names, data = list(config.mechanisms), main.load_images()
    together = Images(config, data).costs(names, lambda _: None)
    assert said == ["reset", "compile", "compile", *2 * ["time softmax+relu"]]
    assert measure.groups_to_measure(names, torch.device("cuda")) == [["softmax"], ["relu"]]
    said.clear()
    monkeypatch.setattr(measure, "groups_to_measure", lambda names, device: [[name] for name in names])
    apart = Images(config, data).costs(names, lambda _: None)
    assert said == [word for name in names for word in ("reset", "compile", *2 * [f"time {name}"])]
    assert apart == together
    assert [apart[name]["images_per_second_train"] for name in names] == [2.0, 2.0]


def test_costs_are_on_disk_before_attention_is_looked_at(tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(Images, "attention", fails)
    monkeypatch.setattr(Images, "costs", lambda *_: {"relu": {"parameters": 5}})
    config = config_for(tmp_path / "c", mechanisms=("relu",), seeds=1, train=replace(TRAIN, epochs=1))
    with pytest.raises(MemoryError):
        run(config)
    (entry,) = results_of(config)["mechanisms"]
    assert entry["parameters"] == 5
