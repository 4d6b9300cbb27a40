"""A comparison on sequences end to end: chosen rates, spreads, costs; killed and started again."""

import csv
import json
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from linattn.compare import compare as main
from linattn.compare.cells import CellResult, best_lrs, sweep_cells
from linattn.compare.compare import compare
from linattn.compare.text import costs
from linattn.compare.text.settings import TextCompareConfig
from linattn.compare.text.subject import Texts, validation
from linattn.report import ranking_sentence
from linattn.support.options import OptionError
from linattn.tasks.text import text_task
from linattn.train.text.config import TextConfig
from linattn.train.text.hosts import HostOptions

ROOT = Path(__file__).parents[2]
CONFIG = TextCompareConfig(
    "mqar", {"vocab": 32, "length": 16, "test_examples": 8}, ("softmax", "elu"), (None, "B"), (16, 32),
    HostOptions("pico", depth=1, heads=1), True,
    TextConfig(steps=2, batch_size=4, lr=1e-2, warmup_steps=0, eval_every=1), seeds=1, lrs=(1e-3, 1e-2),
)  # fmt: skip
KILLED = """
import os, signal, sys, torch
from pathlib import Path
from dataclasses import replace
from linattn.compare import compare as main
from linattn.compare.text import subject
from tests.compare.test_compare_text import CONFIG, run
torch.set_num_threads(1)
train, done = subject.train_text, []
def die(*args, **options):
    if len(done) == 19:  # in the middle of the runs after the sweep, with a checkpoint behind
        options["on_record"] = lambda record: os.kill(os.getpid(), signal.SIGKILL)
    done.append(1)
    return train(*args, **options)
subject.train_text = die
run(replace(CONFIG, output=Path(sys.argv[1]), keep_weights=False))
"""


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


def test_a_killed_comparison_ends_the_same(whole, tmp_path):
    config = replace(CONFIG, output=tmp_path / "c", keep_weights=False)
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(config.output)], cwd=ROOT, check=False, capture_output=True
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert [row["status"] for row in results_of(config)["rows"]] == ["done"] * 3 + ["waiting"] * 5
    half = config.output / "runs" / "elu+B-16"
    assert [path.name for path in half.glob("*/checkpoint.pt")] == ["checkpoint.pt"]
    patch = pytest.MonkeyPatch()
    patch.setattr(costs, "measure_in_turns", lambda calls, *_, **__: {})
    patch.setattr(costs, "peak_bytes", lambda *_: 0)
    patch.setattr(main, "finish", lambda *_: None)
    assert run(config)[0] == 0
    patch.undo()

    def numbers(of):
        rows = results_of(of)["rows"]
        return [(r["mechanism"], r["lr"], r["score"], [e["train_loss"] for e in r["epochs"]]) for r in rows]

    assert numbers(config) == numbers(whole[0])
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
