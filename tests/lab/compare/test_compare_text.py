"""A comparison on sequences end to end: chosen rates, spreads, costs; killed and started again."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from linattn.lab.cases import Outcome
from linattn.lab.command import main
from linattn.lab.compare import costs
from linattn.lab.compare import text as text_module
from linattn.lab.compare.findings import Findings
from linattn.lab.compare.text import CompareText
from linattn.lab.screen import Screen
from linattn.lab.train.text.loop import TextRun, train_text
from linattn.support.options import OptionError

ROOT = Path(__file__).parents[3]
CONFIG = CompareText(
    task="mqar", set={"vocab": 32, "length": 16, "test_examples": 8, "train_examples": None}, recipe="mqar-64",
    mechanisms=("softmax", "elu"), canon=("none", "B"), widths=(16, 32), size="pico", depth=1, heads=1,
    equal_parameters=True, steps=2, batch_size=4, warmup_steps=0, eval_every=1, seeds=1, lr=(1e-3, 1e-2), device="cpu",
    jobs=1, output=Path("c"),
)  # fmt: skip
QUIET = Screen(quiet=True)
NAMES = [f"{series} {width}" for width in (16, 32) for series in ("softmax", "softmax+B", "elu", "elu+B")]


def results_of(config):
    return json.loads((config.folder / "results.json").read_text())


def rows_of(config, kind):
    return {row["mechanism"]: row for row in results_of(config)["rows"] if row["kind"] == kind}


@pytest.fixture(autouse=True)
def one_thread():
    """As each of several processes has it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = replace(CONFIG, output=tmp_path_factory.mktemp("compare") / "c")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "MIN_SECONDS", 0.0)
        assert config.run(QUIET) == 0
    return config


def test_it_writes_what_it_found(whole):
    results = results_of(whole)
    swept = [row for row in results["rows"] if row["kind"] == "sweep"]
    runs, measured = rows_of(whole, "run"), rows_of(whole, "cost")
    assert list(runs) == list(measured) == NAMES
    for name, row in runs.items():
        assert row["score"] == row["records"][-1]["metrics"]["accuracy"] == row["metrics"]["accuracy"]
        assert [record["step"] for record in row["records"]] == [1, 2]
        tried = [one for one in swept if one["mechanism"] == name]
        assert [one["lr"] for one in tried] == [1e-3, 1e-2]
        assert row["lr"] == max(tried, key=lambda one: (one["validation"], -one["lr"]))["lr"]
        assert min(measured[name]["tokens_per_second_train"]) > 0
    # one head of 16: softmax keeps 16 keys and values, elu 16 x 16 and its denominator; Canon 3 inputs of q, k and v
    assert measured["softmax 16"]["state_bytes"] == 4 * 2 * 16 * 16
    assert measured["elu 16"]["state_bytes"] == 4 * 16 * 17
    assert measured["elu+B 16"]["state_bytes"] == 4 * (16 * 17 + 3 * 48)
    sizes = [measured[name]["parameters"] for name in NAMES[:4]]
    assert max(abs(size - sizes[0]) for size in sizes) <= 3 * 16 * 4
    page = (whole.folder / "report.html").read_text()
    assert all(title in page for title in ("Accuracy against state", "Accuracy against speed", "Learning curves"))
    (whole.folder / "report.html").unlink()
    assert main(["report", str(whole.folder), "--quiet"]) == 0
    assert (whole.folder / "report.html").read_text() == page


def test_a_run_that_chose_a_rate_is_the_final_run(whole, tmp_path):
    """What it scored and its weights are those of a run that was trained for nothing else."""
    row = rows_of(whole, "run")["elu 16"]
    host, config = whole.hosts["elu 16"], whole.training(row["lr"], 0)
    found = train_text(text_module.create_host(host, whole.made, 0), whole.made, config, tmp_path)
    assert (found.score, found.records[-1].metrics) == (row["score"], row["metrics"])
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert any(path.read_bytes() == weights for path in whole.folder.rglob("model.safetensors"))
    _, held_out = whole.validation
    again = text_module.create_host(host, whole.made, 0)
    assert (
        train_text(again, whole.made, config, tmp_path / "v", validation=held_out).validation["accuracy"]
        == (row["validation"])
    )


def test_more_seeds_join_and_nothing_is_trained_twice(whole, tmp_path, monkeypatch):
    taken, real = [], TextRun.train_step
    monkeypatch.setattr(TextRun, "train_step", lambda *args: taken.append(1) or real(*args))
    monkeypatch.setattr(costs, "MIN_SECONDS", 0.0)
    copy = replace(whole, output=tmp_path / "c")
    shutil.copytree(whole.folder, copy.folder)
    assert copy.run(QUIET) == 0
    assert not taken
    assert results_of(copy)["rows"] == results_of(whole)["rows"]
    files = list(copy.folder.rglob("*.safetensors"))
    more = replace(copy, seeds=2, mechanisms=("elu",), widths=(16,), equal_parameters=False, weights=False)
    assert more.run(QUIET) == 0
    assert len(taken) == 2 * 2 * (2 + 1)  # other hosts: with and without Canon layers, two rates, one more seed
    assert list(copy.folder.rglob("*.safetensors")) == files != []


def test_what_results_depend_on_is_what_affects_them(tmp_path):
    case = CONFIG.final_cases(CONFIG.choose([]))[0]

    def same(**changes):
        other = replace(CONFIG, **changes)
        return other.final_cases(other.choose([]))[0] == case

    assert same(seeds=3, widths=(16,), output=tmp_path, jobs=2, weights=False, margin=1.0, graphs=None)
    assert same(set=CONFIG.set | {"cache": str(tmp_path)})
    assert not same(steps=3)
    assert not same(set=CONFIG.set | {"pairs": 2})
    assert not same(dropout=0.1)
    assert not same(precision="bf16")
    text = tmp_path / "a.txt"
    text.write_text("one text and no other. " * 40)
    of_text = replace(CONFIG, task="text", data=str(text), set={"length": 16}, recipe="")
    before = of_text.final_cases(of_text.choose([]))[0]
    text.write_text("no other and one text. " * 40)
    again = replace(of_text)
    assert again.final_cases(again.choose([]))[0] != before


def test_rates_are_chosen_on_data_that_is_neither_trained_nor_tested_on(tmp_path):
    train, test = CONFIG.validation
    assert train is CONFIG.made
    assert CONFIG.sweep_is_final
    assert not torch.equal(next(test.test_batches(4)).inputs, next(train.test_batches(4)).inputs)
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(97 + i % 26) * (i % 7 + 1) for i in range(400)))
    text = replace(CONFIG, task="text", data=str(path), set={"length": 8}, recipe="")
    assert text.validation[1].evaluate == "valid"
    rows = [{"text": f"{i}", "label": i % 2} for i in range(20)]
    for part in ("train", "test"):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    labelled = replace(CONFIG, task="lra-text", data=str(tmp_path), set={"length": 4}, recipe="")
    kept, held = labelled.validation
    assert kept is held
    assert not labelled.sweep_is_final
    assert all(case["validation"] for case in labelled.sweep_cases())
    trained = torch.cat([kept.train_batch(6, 0, step).inputs for step in range(9)]).unique(dim=0)
    judged = next(held.test_batches(50)).inputs
    assert len(trained) + len(judged) == 20
    assert not any((trained == row).all(1).any() for row in judged)


def test_where_less_is_better_the_lowest_wins(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 30)
    config = replace(CONFIG, task="text", data=str(path), set={"length": 8}, recipe="", mechanisms=("elu",),
                     canon=("none",), widths=(16,))  # fmt: skip
    swept = [Outcome(case, {"validation": value}) for case, value in zip(config.sweep_cases(), (1.5, 1.2), strict=True)]
    assert config.choose(swept) == {"elu 16": {"lr": 1e-2}}
    final = Outcome(config.final_cases(config.choose(swept))[0], {"score": 1.2, "seconds": 3.0})
    tried = [Outcome({**swept[0].case, "lr": lr}, swept[0].result) for lr in (1e-4, 1e-3, 1e-2)]
    rows = config.rows([*(("sweep", one) for one in tried), ("run", final)])
    found = Findings({"metric": asdict(config.metric())}, rows)
    assert {name: str(cell) for name, cell in found.columns()[0].cells.items()} == {"elu 16": "1.2000"}
    assert any("elu 16 (highest, 0.01)" in words for words in found.sentences), "a better one may lie beyond"


def test_a_state_is_weighed_at_the_longest_sequence():
    lengths = {"train": ((16, 2, 8),), "test": ((16, 2, 3), (32, 4, 2), (16, 4, 2))}
    config = replace(
        CONFIG, task="mqar-mix", set={"vocab": 32} | lengths, recipe="", mechanisms=("softmax",), heads=None
    )
    assert text_module.longest_sequence(config.made).shape == (1, 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mechanisms": ()}, "mechanisms: name at least one"),
        ({"mechanisms": ("nobody",)}, "mechanisms: must be one of"),
        ({"mechanisms": ("softmax", "agent")}, "mechanisms: agent 16: mechanism 'agent' is only bidirectional"),
        ({"mechanisms": ("gated*x",)}, r"mechanisms: gated\*x 16: must look like"),
        ({"widths": (15,), "heads": 2}, "heads: softmax 15: num_attention_heads must divide"),
        ({"lr": (0.0,)}, "lr: must be above 0"),
        ({"option": {"lion.decay": "fixed"}}, "option: lion.decay is given, but lion is not compared"),
        ({"set": {"colour": 1}}, "set: colour: is no option"),
        ({"output": Path("README.md") / "c"}, "output: must be a folder that can be written to"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_written(tmp_path, changes, words):
    with pytest.raises(OptionError, match=words):
        replace(CONFIG, **{"output": tmp_path / "c"} | changes).run(QUIET)
    assert not (tmp_path / "c").exists()


def test_options_go_to_the_mechanisms_that_have_them():
    config = replace(CONFIG, mechanisms=("elu", "gated"), option={"gated.gate": "head"}, equal_parameters=False)
    config.check_hosts()
    assert config.hosts["elu 16"].option == {}
    assert config.hosts["gated+B 16"].option == {"gated.gate": "head"}
