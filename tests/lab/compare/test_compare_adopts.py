"""What is trained while learning rates are chosen is not trained again, and nobody can tell from the results."""

import json
import re
from dataclasses import replace
from io import StringIO
from shutil import rmtree

import pytest
import torch
from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.lab.compare.text.subject import Texts
from linattn.lab.train.text.folder import TextFolder
from rich.console import Console

from linattn.lab.compare import compare as main
from linattn.lab.compare.compare import compare
from linattn.lab.compare.text import adopt, subject
from linattn.lab.train.text import run as text_run
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.feed import Feed
from linattn.lab.train.text.hosts import HostOptions

# Two contenders, two rates, two seeds: of eight runs two are the same. Two evaluations each, checkpoints at every step.
CONFIG = TextCompareConfig(
    "mqar", {"vocab": 32, "length": 16, "test_examples": 8}, ("elu", "gated"),
    host=HostOptions("pico", width=16, depth=1, heads=1, dropout=0.1),
    train=TextConfig(steps=4, batch_size=4, warmup_steps=0, eval_every=2, checkpoint_seconds=1e-9),
    seeds=2, lrs=(1e-3, 3e-2),
)  # fmt: skip
SWEPT, FINAL, STEPS = 4, 4, 4


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def only_training(monkeypatch):
    monkeypatch.setattr(Texts, "costs", lambda self, names, on_work: {})
    monkeypatch.setattr(main, "finish", lambda *_: None)


@pytest.fixture
def steps(monkeypatch):
    """How many were taken, in all runs."""
    taken, real = [], text_run.TextRun.train_step
    monkeypatch.setattr(text_run.TextRun, "train_step", lambda *args: taken.append(1) or real(*args))
    return taken


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    """The same comparison where every final run is trained, in one thread as each of several processes has it."""
    config = replace(CONFIG, output=tmp_path_factory.mktemp("again") / "c")
    with pytest.MonkeyPatch.context() as patch:
        only_training.__wrapped__(patch)
        patch.setattr(subject, "holds_out", lambda task: True)
        patch.setattr(subject, "validation", lambda task: (task, replace(task, data_seed=task.data_seed + 1)))
        assert run(config)[0] == 0
    assert not list(config.output.rglob(adopt.OWN_TEST))
    return config


def run(config):
    screen = StringIO()
    return compare(config, Console(file=screen, width=200)), screen.getvalue()


def plain(value):
    """But for what a clock says."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items() if "seconds" not in name}
    return [plain(entry) for entry in value] if isinstance(value, list) else value


def results_of(config):
    found = plain(json.loads((config.output / "results.json").read_text()))
    del found["meta"]["command"], found["meta"]["date"]
    return found


def files_of(config):
    """All of final runs, with what is in them."""
    found = {}
    for path in sorted(config.output.glob("runs/**/*")):
        if path.suffix == ".json":
            content = plain(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            content = [plain(json.loads(line)) for line in path.read_text().splitlines()]
        else:
            content = path.read_bytes() if path.is_file() else None
        found[path.relative_to(config.output)] = content
    return found


def check_same(config, again):
    assert results_of(config) == results_of(again)
    assert files_of(config) == files_of(again)


def test_results_and_files_are_those_of_runs_that_are_trained_again(again, tmp_path, steps):
    config = replace(CONFIG, output=tmp_path / "c")
    code, text = run(config)
    assert code == 0
    assert len(steps) == STEPS * (SWEPT + FINAL - 2)
    check_same(config, again)
    assert "4 runs (2 mechanisms x 2 seeds), 2 of them taken from 4 runs that choose learning rates" in text
    assert re.findall(r"^\[\d+/\d+\]", text, re.M) == [f"[{number}/6]" for number in range(1, 7)]
    assert len(re.findall(r"^\w+, lr .* seed 0: .* trained while learning rates were chosen$", text, re.M)) == 2
    rows = json.loads((config.output / "results.json").read_text())["rows"]
    for row in rows:
        tried = config.output / "sweep" / row["mechanism"] / f"lr-{row['lr']:g}-seed-0"
        held = json.loads((tried / "result.json").read_text())
        assert [record["step"] for record in row["epochs"]] == [2, 4]
        if row["seed"] == 0:
            assert row["train_seconds"] == held["seconds"] > 0
            assert row["epochs"][-1]["metrics"] != held["records"][-1]["metrics"]  # of other sequences
    assert len(list(config.output.rglob("*.safetensors"))) == SWEPT + FINAL
    text = run(config)[1]
    assert len(steps) == STEPS * (SWEPT + FINAL - 2), "started again it trains nothing"
    assert re.findall(r"^\[\d+/\d+\]", text, re.M) == [f"[{number}/6]" for number in range(1, 7)]


def test_the_test_data_chooses_no_rate(again, tmp_path, monkeypatch):
    """Not even where they would choose the other one: here the best on held-out data is the worst on them."""
    real, held = text_run.TextRun._evaluated, []
    monkeypatch.setattr(Feed, "own_test", lambda self: None)

    def opposed(self, batches, reading, lr):
        if batches is None:
            return replace(held[-1], score=-held[-1].score)
        held.append(real(self, batches, reading, lr))
        return held[-1]

    monkeypatch.setattr(text_run.TextRun, "_evaluated", opposed)
    config = replace(CONFIG, output=tmp_path / "c", seeds=1)
    assert run(config)[0] == 0
    found, wanted = results_of(config), results_of(again)
    assert all(row["score"] < 0 for row in found["rows"])
    for name in ("lr", "sweep"):
        assert [entry[name] for entry in found["mechanisms"]] == [entry[name] for entry in wanted["mechanisms"]]
    assert any(len({tried["score"] for tried in entry["sweep"]}) == 2 for entry in found["mechanisms"])


def test_a_test_loss_that_is_not_finite_stops_no_run_that_chooses_a_rate(again, tmp_path, monkeypatch, steps):
    real = text_run.evaluate
    monkeypatch.setattr(Feed, "own_test", lambda self: None)
    monkeypatch.setattr(
        text_run, "evaluate",
        lambda network, batches, accelerator: real(network, batches, accelerator) if batches is not None
        else {"loss": float("nan"), "accuracy": 100.0},
    )  # fmt: skip
    config = replace(CONFIG, output=tmp_path / "c")
    code, text = run(config)
    assert code == 0
    check_same(config, again)
    assert len(steps) == STEPS * (SWEPT + FINAL)
    assert "[8/8]" in text  # what was to be taken from others is counted when it is known that it is not


def fail_at(patch, place, name, number):
    """Ctrl-C in the call number ``number`` of this function."""
    real, calls = getattr(place, name), []

    def called(*args, **options):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*args, **options)

    patch.setattr(place, name, called)
    return calls


@pytest.mark.parametrize(
    ("place", "name", "number", "lost"),
    [
        (text_run.TextRun, "train_step", 6, 0),  # in the first round, from a checkpoint
        (text_run.TextRun, "train_step", 8, 0),  # in the second, with one record of each kind behind
        (text_run, "evaluate", 2, 1),  # between the two evaluations: only what was not in the checkpoint is lost
        (text_run, "evaluate", 4, 1),
        (
            TextFolder,
            "save_result",
            3,
            0,
        ),  # of the rate that is chosen: before the result that is kept for the final run
        (TextFolder, "save_result", 4, 0),  # before the one that counts
        (TextFolder, "copy_weights", 2, 0),
        (adopt, "write_atomically", 1, 0),
        (adopt, "write_atomically", 2, 0),  # before the result of the first final run
        (adopt, "write_atomically", 3, 0),
    ],
)
def test_interrupted_anywhere_it_goes_on(again, tmp_path, monkeypatch, steps, place, name, number, lost):
    config = replace(CONFIG, output=tmp_path / "c")
    with monkeypatch.context() as patch:
        fail_at(patch, place, name, number)
        assert run(config)[0] == 130
    for entry in results_of(again)["mechanisms"]:  # what a kill would leave half written
        folder = config.output / "runs" / entry["mechanism"] / f"lr-{entry['lr']:g}-seed-0"
        if not (folder / "result.json").exists():
            (folder / ".model-x").mkdir(parents=True)
            (folder / ".result-x.json").touch()
    assert run(config)[0] == 0
    assert len(steps) == STEPS * (SWEPT + FINAL - 2) + lost
    assert not [*config.output.rglob(".*")]
    check_same(config, again)


def test_a_checkpoint_without_records_on_test_data_leaves_the_final_run_to_be_trained(
    again, tmp_path, monkeypatch, steps
):
    """As earlier versions have left them."""
    config = replace(CONFIG, output=tmp_path / "c")
    with monkeypatch.context() as patch:
        fail_at(patch, text_run.TextRun, "train_step", 8)
        run(config)
    (path,) = config.output.rglob("checkpoint.pt")
    content = torch.load(path, weights_only=True)
    assert len(content.pop("own_records")) == content["epoch"] == 1
    torch.save(content, path)
    lr = float(path.parent.name.split("-")[1])
    assert run(config)[0] == 0
    chosen = lr == results_of(config)["mechanisms"][0]["lr"]
    assert len(steps) == STEPS * (SWEPT + FINAL - 2 + chosen)
    assert not (path.parent / adopt.OWN_TEST).exists()
    check_same(config, again)


@pytest.mark.parametrize("there", [False, True])
def test_what_does_not_fit_is_trained_again(again, tmp_path, steps, there):
    """Of a comparison by an earlier version nothing is there; of one with another model something else is."""
    config = replace(CONFIG, output=tmp_path / "c")
    run(config)
    rmtree(config.output / "runs")
    for tried in config.output.glob("sweep/*/*"):
        path = tried / adopt.OWN_TEST / "result.json"
        changed = re.sub(r'"model": "\w+"', '"model": "another"', path.read_text())
        path.unlink()
        if there:
            path.write_text(changed)
    steps.clear()
    code, text = run(config)
    assert code == 0
    assert len(steps) == STEPS * FINAL
    assert "[8/8]" in text
    check_same(config, again)


def test_without_weights_none_are_copied_and_where_they_are_wanted_nothing_is_adopted(again, tmp_path, steps):
    config = replace(CONFIG, output=tmp_path / "c", keep_weights=False)
    run(config)
    assert len(steps) == STEPS * (SWEPT + FINAL - 2)
    assert results_of(config) == results_of(again)
    assert not [*config.output.rglob("*.safetensors"), *config.output.rglob("*.pt")]
    cells = [main.Cell(entry["mechanism"], 0, entry["lr"]) for entry in results_of(again)["mechanisms"]]
    assert all(map(Texts(config).adopt, cells))
    assert not any(map(Texts(replace(config, keep_weights=True)).adopt, cells))


def test_in_several_processes_it_is_the_same(tmp_path, again):
    config = replace(CONFIG, output=tmp_path / "c", jobs=2)
    code, text = run(config)
    assert code == 0, text
    assert text.count("trained while learning rates were chosen") == 2
    assert "[6/6]" in text
    check_same(config, again)


def write_reviews(folder):
    for part in ("train", "test"):
        rows = [{"text": f"{part} {i}", "label": i % 2} for i in range(40)]
        (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"data": str(folder), "length": 8}


def test_where_examples_are_held_out_everything_is_trained(tmp_path, steps):
    config = replace(
        CONFIG, task="lra-text", settings=write_reviews(tmp_path), patterns=("elu",), output=tmp_path / "c"
    )
    code, text = run(config)
    assert code == 0, text
    assert len(steps) == STEPS * (2 + 2)
    assert "2 runs (1 mechanism x 2 seeds) after 2 runs that choose learning rates" in text
    assert "[4/4]" in text
    assert not list(config.output.rglob(adopt.OWN_TEST))


def test_a_text_has_a_part_to_choose_by_and_bits_of_its_test_part(tmp_path, steps):
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(97 + i % 26) * (i % 7 + 1) for i in range(600)))
    config = replace(
        CONFIG,
        task="text",
        settings={"data": str(path), "length": 8},
        patterns=("elu",),
        seeds=1,
        output=tmp_path / "c",
    )
    assert run(config)[0] == 0
    assert len(steps) == STEPS * 2
    (row,) = results_of(config)["rows"]
    alone = Texts(replace(config, output=tmp_path / "alone"))
    wanted = alone.trainer(lambda *_: None, lambda *_: None).run(main.Cell("elu", 0, row["lr"]))
    assert row["epochs"] == plain(wanted.epochs)
    assert row["score"] == wanted.score == row["epochs"][-1]["metrics"]["bits_per_byte"]
