"""A comparison on sequences end to end: chosen rates, spreads, costs; killed and started again."""

import csv
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from linattn.lab.train.recorder import RecordError
from rich.console import Console

from linattn.lab.compare import compare as main
from linattn.lab.compare.cells import CellResult, best_lrs, sweep_cells
from linattn.lab.compare.compare import compare
from linattn.lab.compare.results import Results
from linattn.lab.compare.text import costs, subject
from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.lab.compare.text.subject import Texts, validation
from linattn.lab.pages import edge_sentence, ranking_sentence
from linattn.lab.tasks.text import text_task
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.hosts import HostOptions
from linattn.support.options import OptionError

ROOT = Path(__file__).parents[3]
CONFIG = TextCompareConfig(
    "mqar", {"vocab": 32, "length": 16, "test_examples": 8}, ("softmax", "elu"), (None, "B"), (16, 32),
    HostOptions("pico", depth=1, heads=1), True,
    TextConfig(steps=2, batch_size=4, lr=1e-2, warmup_steps=0, eval_every=1), seeds=1, lrs=(1e-3, 1e-2),
)  # fmt: skip
KILLED = """
import os, signal, sys, torch
from pathlib import Path
from dataclasses import replace
from linattn.lab.compare import compare as main
from linattn.lab.compare.text import subject
from tests.lab.compare.test_compare_text import CONFIG, run
torch.set_num_threads(1)
train, done = subject.train_text, []
def die(*args, **options):
    if len(done) == 27:  # in the middle of the second seed, with a checkpoint behind
        options["on_record"] = lambda record: os.kill(os.getpid(), signal.SIGKILL)
    done.append(1)
    return train(*args, **options)
subject.train_text = die
run(replace(CONFIG, output=Path(sys.argv[1]), keep_weights=False, seeds=2))
"""


@pytest.mark.parametrize(("jobs", "named", "files"), [(2, True, 2), (1, True, 0), (2, False, 0)])
def test_processes_read_what_was_drawn_for_all_of_them(jobs, named, files, tmp_path):
    """Before they start, where there is a place for it; one process alone draws when it trains."""
    settings = CONFIG.settings | {"train_examples": 16, "cache": str(tmp_path) if named else None}
    told = []
    Texts(replace(CONFIG, settings=settings, jobs=jobs)).prepare(told.append)
    assert len(told) == len(list(tmp_path.rglob("*.pt"))) == files


def test_heads_of_a_fixed_width_are_told_for_every_host():
    fixed = replace(CONFIG.host, heads=None, head_dim=8)
    assert Texts(replace(CONFIG, host=fixed)).describe()["host"]["heads"] == [2, 4]
    assert Texts(replace(CONFIG, host=fixed, widths=(None,))).describe()["host"]["heads"] == 8
    assert Texts(CONFIG).describe()["host"]["heads"] == 1


def run(config):
    screen = StringIO()
    return compare(config, Console(file=screen, width=160)), screen.getvalue()


def results_of(config):
    return json.loads((config.output / "results.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One comparison, and what it printed."""
    config = replace(CONFIG, output=tmp_path_factory.mktemp("compare") / "c")
    patch = pytest.MonkeyPatch()
    patch.setattr(costs, "MIN_SECONDS", 0.0)
    code, text = run(config)
    patch.undo()
    assert code == 0, text
    return config, text


def test_it_writes_what_it_found(whole):
    config, text = whole
    results = results_of(config)
    names = [entry["mechanism"] for entry in results["mechanisms"]]
    assert names == [f"{series} {width}" for width in (16, 32) for series in ("softmax", "softmax+B", "elu", "elu+B")]
    for entry in results["mechanisms"]:
        (row,) = (row for row in results["rows"] if row["mechanism"] == entry["mechanism"])
        assert row["score"] == entry["score_mean"] == row["epochs"][-1]["metrics"]["accuracy"]
        assert [record["step"] for record in row["epochs"]] == [1, 2]
        assert entry["lr"] == max(entry["sweep"], key=lambda tried: (tried["score"], -tried["lr"]))["lr"] == row["lr"]
        assert f"{entry['score_mean']:.2f}" in text
        assert entry["tokens_per_second_train"] > 0
    narrow = {entry["series"]: entry for entry in results["mechanisms"][:4]}
    # one head of 16: softmax keeps 16 keys and values, elu 16 x 16 and its denominator; Canon 3 inputs of q, k and v
    assert narrow["softmax"]["state_bytes"] == 4 * 2 * 16 * 16
    assert narrow["elu"]["state_bytes"] == 4 * 16 * 17
    assert narrow["elu+B"]["state_bytes"] == 4 * (16 * 17 + 3 * 48)
    assert max(abs(entry["parameters"] - narrow["softmax"]["parameters"]) for entry in narrow.values()) <= 3 * 16 * 4
    files = {path.name for path in config.output.iterdir()}
    assert {"results.csv", "runs.csv", "report.html", "charts"} <= files
    assert {"accuracy-state.png", "accuracy-speed.png"} <= {path.name for path in (config.output / "charts").iterdir()}
    page = (config.output / "report.html").read_text()
    assert "Accuracy against state" in page
    assert "images" not in page.split("<main>")[1]
    with (config.output / "results.csv").open() as file:
        assert [line["mechanism"] for line in csv.DictReader(file)] == names


def test_every_line_counts_to_the_same_end_and_says_how_long(whole):
    _, text = whole
    lines = [line for line in text.splitlines() if line.startswith("[")]
    assert [line.split("]")[0] for line in lines] == [f"[{number}/16" for number in range(1, 17)]
    assert all("trained in 0 s" in line for line in lines)
    assert all(("left" in line) == (number < 16) for number, line in enumerate(lines, 1))
    assert text.count("trained while learning rates were chosen") == 8


def test_an_interrupted_comparison_has_what_is_known_without_training(whole, tmp_path, monkeypatch):
    config = replace(CONFIG, output=tmp_path / "c", lrs=(1e-3,))
    train, done = subject.train_text, []

    def interrupted(*args, **options):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return train(*args, **options)

    monkeypatch.setattr(subject, "train_text", interrupted)
    code, text = run(config)
    assert code == 130
    assert "The same command goes on" in text
    found, complete = results_of(config), results_of(whole[0])
    assert [row["status"] for row in found["rows"]] == ["done"] * 2 + ["waiting"] * 6
    assert not found["meta"]["finished"]
    for entry, other in zip(found["mechanisms"], complete["mechanisms"], strict=True):
        for name in ("parameters", "mechanism_parameters", "state_bytes"):
            assert entry[name] == other[name]
        assert "tokens_per_second_train" not in entry


def interrupt(*args, **options):
    raise KeyboardInterrupt


def test_costs_that_were_measured_outlast_an_interruption(tmp_path, monkeypatch):
    """On a GPU mechanisms are measured one by one: the second is interrupted, and alone measured again."""
    config = replace(CONFIG, output=tmp_path / "c", lrs=(), canons=(None,), widths=(16,))
    monkeypatch.setattr(main, "groups_to_measure", lambda names, device: [[name] for name in names])
    monkeypatch.setattr(main, "finish", lambda *_: None)
    asked = []

    def measure(self, names, on_work):
        asked.extend(names)
        if asked == ["softmax 16", "elu 16"]:
            raise KeyboardInterrupt
        return {name: {"peak_bytes_train": len(asked)} for name in names}

    monkeypatch.setattr(Texts, "costs", measure)
    assert run(config)[0] == 130
    assert [entry.get("peak_bytes_train") for entry in results_of(config)["mechanisms"]] == [1, None]
    assert run(config)[0] == 0
    assert asked == ["softmax 16", "elu 16", "elu 16"]
    assert [entry["peak_bytes_train"] for entry in results_of(config)["mechanisms"]] == [1, 3]
    monkeypatch.setattr(subject, "train_text", interrupt)  # of a second seed: what is known is known from the start
    assert run(replace(config, seeds=2))[0] == 130
    assert asked == ["softmax 16", "elu 16", "elu 16"]
    assert [entry["peak_bytes_train"] for entry in results_of(config)["mechanisms"]] == [1, 3]


def test_a_rate_at_the_edge_is_told(tmp_path):
    config = replace(CONFIG, patterns=("elu", "relu"), canons=(None,), widths=(None,), lrs=(1e-3, 3e-3, 1e-2))
    texts = Texts(config)
    results = Results(config, texts, {})
    scores = {("elu", 1e-3): 50.0, ("elu", 3e-3): 60.0, ("elu", 1e-2): 70.0,
              ("relu", 1e-3): 50.0, ("relu", 3e-3): 60.0, ("relu", 1e-2): 40.0}  # fmt: skip
    results.swept = [CellResult(c, "done", score=scores[c.mechanism, c.lr]) for c in sweep_cells(config)]
    results.lrs = best_lrs(config, results.swept)
    written = results.as_json()
    assert [entry["lr_edge"] for entry in written["mechanisms"]] == ["highest", None]
    assert edge_sentence(written).endswith("may lie beyond: elu (highest, 0.01).")
    results.lrs["relu"] = 1e-3
    assert edge_sentence(results.as_json()).endswith("elu (highest, 0.01) and relu (lowest, 0.001).")


def test_a_state_is_weighed_at_the_longest_sequence():
    task = text_task("mqar-mix", vocab=32, train=((16, 2, 8),), test=((16, 2, 3), (32, 4, 2), (16, 4, 2)))
    assert costs.longest_sequence(task).shape == (1, 32)
    found = costs.known_costs({"softmax": HostOptions("mqar", width=16)}, task, CONFIG.train, lambda _: None)
    assert found["softmax"]["state_bytes"] == 2 * 2 * 32 * 16 * 4  # layers, keys and values, tokens, channels, fp32


class FakeRecorder:
    """Knows what a graph would: the call is taken once when it is recorded, and never again."""

    def __init__(self, refuses=False):
        self.refuses, self.events = refuses, []

    def warm_up(self, run):
        self.events.append("warm")
        run()

    def record(self, run):
        if self.refuses:
            raise RecordError("no")
        run()
        self.events.append("record")
        return lambda: self.events.append("replay")


def test_what_was_trained_as_graphs_is_timed_as_graphs():
    calls, recorder = [], FakeRecorder()
    timed = costs.replayed(lambda: calls.append(1), recorder)
    timed()
    timed()
    assert recorder.events == ["warm", "warm", "record", "replay", "replay"]
    assert len(calls) == 3
    costs.replayed(lambda: calls.append(1), FakeRecorder(refuses=True))()
    assert len(calls) == 6  # twice warmed up, then called itself


def test_a_killed_comparison_ends_the_same(whole, tmp_path):
    config = replace(CONFIG, output=tmp_path / "c", keep_weights=False, seeds=2)
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(config.output)], cwd=ROOT, check=False, capture_output=True
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert [row["status"] for row in results_of(config)["rows"]] == ["done"] * 11 + ["waiting"] * 5
    half = config.output / "runs" / "elu+B-16"
    assert [path.name for path in half.glob("*/checkpoint.pt")] == ["checkpoint.pt"]
    patch = pytest.MonkeyPatch()
    patch.setattr(costs, "measure_in_turns", lambda calls, *_, **__: {})
    patch.setattr(costs, "peak_bytes", lambda *_: 0)
    patch.setattr(main, "finish", lambda *_: None)
    assert run(config)[0] == 0
    joined = replace(CONFIG, output=tmp_path / "joined", seeds=2)
    shutil.copytree(whole[0].output, joined.output)
    assert run(joined)[0] == 0
    patch.undo()

    def numbers(of):
        rows = results_of(of)["rows"]
        return [(r["mechanism"], r["lr"], r["score"], [e["train_loss"] for e in r["epochs"]]) for r in rows]

    assert numbers(config) == numbers(joined)
    assert not [*config.output.rglob("*.safetensors"), *config.output.rglob("*.pt")]
    assert [*whole[0].output.rglob("*.safetensors")]


def test_another_budget_does_not_join(whole):
    with pytest.raises(OptionError, match="steps was 2, now 5"):
        compare(replace(whole[0], train=replace(CONFIG.train, steps=5)), Console(file=StringIO()))


def test_rates_are_chosen_on_data_that_is_neither_trained_nor_tested_on(tmp_path):
    drawn = text_task("mqar", vocab=64, test_examples=4)
    train, test = validation(drawn)
    assert train is drawn
    assert not torch.equal(next(test.test_batches(4)).inputs, next(drawn.test_batches(4)).inputs)
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(97 + i % 26) * (i % 7 + 1) for i in range(400)))
    text = text_task("text", data=str(path), length=8)
    assert validation(text)[1].evaluate == "valid"
    rows = [{"text": f"{i}", "label": i % 2} for i in range(20)]
    for part in ("train", "test"):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept, held = validation(text_task("lra-text", data=str(tmp_path), length=4))
    assert kept is held
    trained = torch.cat([kept.train_batch(6, 0, step).inputs for step in range(9)]).unique(dim=0)
    judged = next(held.test_batches(50)).inputs
    assert len(trained) + len(judged) == 20
    assert not any((trained == row).all(1).any() for row in judged)


def test_where_less_is_better_the_lowest_wins():
    config = replace(CONFIG, patterns=("elu",), canons=(None,), widths=(None,))
    cells = sweep_cells(config)
    swept = [CellResult(cell, "done", score=value) for cell, value in zip(cells, (1.5, 1.2), strict=True)]
    assert best_lrs(config, swept, higher=False) == {"elu": 1e-2}
    metric = {"field": "score", "name": "bits per byte", "unit": "", "decimals": 3, "higher": False}
    scores = {"elu": (1.5, 1.6), "gated": (1.2, 1.3), "softmax": (1.0, 1.1)}
    rows = [{"mechanism": n, "status": "done", "score": x} for n, pair in scores.items() for x in pair]
    said = ranking_sentence({"meta": {"kind": "text", "metric": metric}, "rows": rows})
    assert said == (
        "Of the linear mechanisms gated has the lowest mean bits per byte: 1.250 (1.200 to 1.300 over 2 seeds). Every "
        "run of elu is above every run of gated. The reference, softmax, has 1.050 (1.000 to 1.100 over 2 seeds): "
        "every run is below those of gated."
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patterns": ()}, "mechanisms: name at least one"),
        ({"patterns": ("nobody",)}, "mechanisms: must be one of"),
        ({"patterns": ("softmax", "agent")}, "mechanisms: agent 16: mechanism 'agent' is only bidirectional"),
        ({"widths": (16, 16)}, "widths: each may be named once"),
        ({"lrs": (0.0,)}, "lr: must be greater than 0"),
        ({"settings": {"colour": 1}}, "colour: mqar has no such setting"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_written(tmp_path, changes, words):
    with pytest.raises(OptionError, match=words):
        compare(replace(CONFIG, output=tmp_path / "c", **changes), Console(file=StringIO()))
    assert not (tmp_path / "c").exists()


def test_options_go_to_the_mechanisms_that_have_them():
    host = replace(CONFIG.host, options={"gated": {"gate": "head"}})
    texts = Texts(replace(CONFIG, patterns=("elu", "gated"), host=host, equal_parameters=False))
    texts.check()
    assert texts.hosts["elu 16"].options == {}
    assert texts.hosts["gated+B 16"].options == {"gated": {"gate": "head"}}
