"""Conversions end to end, on few images and one block: what is reported, what is kept, what is held out."""

import json
from concurrent.futures import Future
from dataclasses import replace
from io import StringIO

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from linattn.lab.cli.compare_conversion import conversion
from linattn.lab.compare import compare as main
from linattn.lab.compare import measure, workers
from linattn.lab.compare.cells import CellResult, final_cells
from linattn.lab.compare.compare import compare
from linattn.lab.compare.conversion import trainer
from linattn.lab.compare.conversion.models import convert_model, create_deit
from linattn.lab.compare.conversion.settings import ConversionConfig, with_start_options
from linattn.lab.compare.conversion.sources import SOURCE
from linattn.lab.tasks import load_images
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.records import DivergedError
from linattn.support.options import OptionError

pytest.importorskip("timm", reason="the extra `vision` is not installed: nothing to convert")
DATA = load_images("digits").subset(train=96, test=64, seed=0)
TRAIN = TrainConfig(epochs=4, batch_size=32, lr=2e-3, warmup_epochs=1)
CONFIG = ConversionConfig("digits", ("softmax", "relu"), patch_size=4, depth=1, train=TRAIN, share=0.25, seeds=2)


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(main, "load_images", lambda *_, **__: DATA)
    monkeypatch.setattr(measure, "throughput_in_turns", lambda models, *_, **__: dict.fromkeys(models, 1.0))


def run(config):
    screen = StringIO()
    code = compare(config, Console(file=screen, width=200))
    return code, screen.getvalue(), json.loads((config.output / "results.json").read_text())


def accuracy(model):
    mean, std = (x.float().view(1, -1, 1, 1) for x in DATA.mean_std())
    with torch.no_grad():
        found = model.eval()((DATA.test.images / 255 - mean) / std).argmax(1)
    return 100 * (found == DATA.test.labels).double().mean().item()


def test_conversions_are_reported_before_right_after_and_at_the_end(tmp_path, monkeypatch):
    config = replace(CONFIG, output=tmp_path / "c")
    code, text, results = run(config)
    assert code == 0, text
    assert "4 epochs, converted and trained for 1 more epoch" in text
    rows = {(row["mechanism"], row["seed"]): row for row in results["rows"]}
    for seed in (0, 1):
        softmax, relu = rows["softmax", seed], rows["relu", seed]
        folder = config.output / "runs" / "before-conversion" / f"seed-{seed}"
        model = create_deit(config, DATA, 99)
        model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
        assert softmax["top1_before"] == relu["top1_before"] == pytest.approx(accuracy(model))
        assert softmax["top1_converted"] == softmax["top1_before"], "the same model"
        assert relu["top1_converted"] == pytest.approx(accuracy(convert_model(model, config, "relu", seed)[0]))
        own = config.output / "runs" / "relu" / f"lr-0.002-seed-{seed}" / "weights.pt"
        model.load_state_dict(torch.load(own, weights_only=True))
        assert relu["top1"] == pytest.approx(accuracy(model))
        assert [len(row["epochs"]) for row in (softmax, relu)] == [1, 1]
    entry = results["mechanisms"][1]
    for field in ("top1_before", "top1_converted"):
        assert entry[f"{field}_mean"] == pytest.approx(sum(rows["relu", s][field] for s in (0, 1)) / 2)
        assert f"{entry[f'{field}_mean']:.2f}" in text
    assert entry["parameters"] > 0
    page, table = ((config.output / name).read_text() for name in ("report.html", "results.csv"))
    assert all(f">{title}<" in page for title in ("before", "converted"))
    assert table.splitlines()[0].count("top1_converted_mean") == 1
    # started again with one more mechanism: nothing that is there is trained or looked at again
    kept = {path: path.stat().st_mtime_ns for path in config.output.glob("runs/**/*") if path.is_file()}
    monkeypatch.setattr(main, "write_report", lambda folder: folder)  # drawn once, above
    code, _, more = run(replace(config, mechanisms=("softmax", "relu", "mirror")))
    assert code == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert more["rows"][0] == results["rows"][0]
    mirror = more["mechanisms"][2]
    assert mirror["options"] == {"reflections": 2}
    assert mirror["top1_converted_mean"] == entry["top1_converted_mean"], "it starts with the plain ReLU of q and k"
    with pytest.raises(OptionError, match=r"share was 0.25, now 0.5"):
        compare(replace(config, share=0.5), Console(file=StringIO()))


def test_a_rate_is_chosen_on_images_that_the_softmax_model_has_not_seen(tmp_path, monkeypatch):
    seen, real = [], trainer.train

    def watched(model, batches, config, folder, **options):
        seen.append((folder.relative_to(tmp_path).parts[0], len(batches.images), config.epochs))
        if config.epochs == 4 and "runs" in folder.parts and config.seed == 1:
            raise DivergedError(0, 0, config.lr)
        return real(model, batches, config, folder, **options)

    monkeypatch.setattr(trainer, "train", watched)
    monkeypatch.setattr(main, "write_report", lambda folder: folder)
    config = replace(CONFIG, mechanisms=("relu",), lrs=(1e-3, 1e-6), output=tmp_path)
    code, text, results = run(config)
    held_out = 86
    assert seen == [
        ("sweep", held_out, 4), ("sweep", held_out, 1), ("sweep", held_out, 1),
        ("runs", 96, 4), ("runs", 96, 4), ("runs", 96, 1),
    ]  # fmt: skip
    assert code == 1
    assert [row["status"] for row in results["rows"]] == ["done", "failed"], "the model of one seed diverged"
    assert "failed: relu, seed 1: the training loss is not finite" in text
    assert {tried["lr"] for tried in results["mechanisms"][0]["sweep"]} == {1e-3, 1e-6}


def test_softmax_models_come_before_what_they_become_and_a_lost_one_takes_its_own_along(monkeypatch):
    """Three processes a mechanism: seeds side by side. Nothing is given out whose softmax model failed."""
    made, given = [], []

    class Pool:
        def __init__(self, size, **_):
            assert size == 1
            made.append(self)

        def submit(self, function, cell):
            given.append((cell.mechanism, cell.seed, made.index(self)))
            future = Future()
            bad = cell.mechanism == SOURCE and cell.seed == 1
            future.set_result(CellResult(cell, "failed", "it diverged") if bad else CellResult(cell, "done"))
            return future

        def shutdown(self):
            pass

    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    config = replace(CONFIG, seeds=3, jobs=6, train=replace(TRAIN, compile=True))
    cells = final_cells(config, dict.fromkeys(config.mechanisms, 1e-3))
    with workers.workers(config) as in_workers:
        found = {(r.cell.mechanism, r.cell.seed): r for r in in_workers(cells, lambda _: None)}
    assert len(made) == 6
    assert given[:3] == [(SOURCE, seed, seed) for seed in range(3)]
    assert sorted(given[3:]) == [("relu", 0, 3), ("relu", 2, 4), ("softmax", 0, 0), ("softmax", 2, 1)]
    assert len(found) == len(cells), "a softmax model is no result of the comparison"
    for (_, seed), result in found.items():
        assert (result.status, result.reason) == (("failed", "it diverged") if seed == 1 else ("done", ""))


@pytest.mark.slow
def test_conversions_in_two_processes_are_those_of_one(tmp_path, monkeypatch):
    numpy = pytest.importorskip("numpy")
    parts = {"train": DATA.train, "test": DATA.test}
    arrays = {f"x_{name}": part.images.numpy() for name, part in parts.items()}
    numpy.savez(tmp_path / "few.npz", **arrays, **{f"y_{name}": part.labels.numpy() for name, part in parts.items()})
    monkeypatch.setattr(main, "write_report", lambda folder: folder)
    found = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for jobs in (2, 1):
            config = replace(CONFIG, data=str(tmp_path / "few.npz"), jobs=jobs, output=tmp_path / str(jobs))
            code, text, results = run(replace(config, train=replace(TRAIN, epochs=1)))
            assert code == 0, text
            assert ("2 at a time" in text) == (jobs == 2)
            found.append([
                {name: value for name, value in row.items() if name not in ("train_seconds", "epochs")}
                | {"losses": [record["train_loss"] for record in row["epochs"]]}
                for row in results["rows"]
            ])  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_a_share_of_the_budget():
    config = replace(CONFIG, train=replace(TRAIN, epochs=30, warmup_epochs=2, min_lr=1e-5), share=0.1)
    after = config.finetuning(seed=1, lr=1e-6)
    assert (after.epochs, after.warmup_epochs, after.seed, after.lr, after.min_lr) == (3, 0.2, 1, 1e-6, 1e-6)
    after.check()
    assert replace(config, train=TRAIN).finetuning(0, 1e-3).epochs == 1, "one at least"


def test_options_join_those_a_conversion_starts_with():
    given = with_start_options(("relu", "mirror"), {"mirror": {"modulation": "none"}})
    assert given == {"mirror": {"reflections": 2, "modulation": "none"}}
    mirror = convert_model(create_deit(CONFIG, DATA, 0), replace(CONFIG, options=given), "mirror", 0)[0]
    assert mirror.blocks[0].attn.mechanism.modulation == "none"
    unchanged = with_start_options(CONFIG.mechanisms, {})
    assert replace(CONFIG, options=unchanged).fingerprint() == CONFIG.fingerprint()


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--mechanisms", "nope"], "--mechanisms"),
        (["--share", "0"], "--share"),
        (["--size", "huge"], "--size"),
        (["--finetune-lr", "0"], "--finetune-lr"),
        (["--mechanisms", "cosformer,lion,agent,relu", "--depth", "0"], "--depth"),
        (["--mechanisms", "mirror", "--option", "mirror.modulation=x"], "--option: mirror: modulation must be"),
        (
            ["--mechanisms", "relu", "--option", "relu.rotary=inputs"],
            "--option: mechanism 'relu' has no option",
        ),
        (["--mechanisms", "relu", "--option", "pola.alpha=2"], "--option: pola.* is given"),
        (["--mechanisms", "relu", "--energy-loss", "0.1"], "--energy-loss: needs a mechanism"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_written(tmp_path, arguments, option):
    app = typer.Typer()
    app.command()(conversion)
    given = [*arguments, "--device", "cpu", "--output", str(tmp_path / "c")]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exit_code == 2, result.output
    assert option in result.output
    assert not (tmp_path / "c").exists()
