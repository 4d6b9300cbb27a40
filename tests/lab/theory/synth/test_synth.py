"""The laboratory of controlled tasks end to end: planned, trained as a comparison, tabled; and resumed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.lab.train.test_captured_hosts import HostAsks

from linattn.lab.command import main
from linattn.lab.compare import text as text_module
from linattn.lab.compare import text_costs as costs
from linattn.lab.screen import Screen
from linattn.lab.tasks.text import Sequences, text_task
from linattn.lab.theory.synth import BUDGETS, METRICS, SCALES, Synth, share_right
from linattn.lab.train.text.hosts import Host, count_parameters, create_host
from linattn.lab.train.text.loop import TextNetwork
from linattn.support.options import OptionError

QUIET = Screen(quiet=True)
CONFIG = Synth(
    task="brevo", set={"nodes": 4, "length": 32, "test_examples": 8}, mechanisms=("softmax", "elu:none"),
    canon=("none", "AC"), widths=(16,), size="pico", depth=1, heads=1, steps=2, batch_size=4, rate=1e-2,
    warmup_steps=0, samples=3, plan=False, device="cpu", jobs=1, output=Path("x"),
)  # fmt: skip
NAMES = ["softmax rotary 16", "softmax+AC rotary 16", "softmax none 16", "softmax+AC none 16", "elu none 16",
         "elu+AC none 16"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = replace(CONFIG, output=tmp_path_factory.mktemp("lab") / "brevo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "MIN_SECONDS", 0.0)
        assert config.run(QUIET) == 0
    return config


def table_of(config):
    return json.loads((config.folder / "table.json").read_text())


def test_the_table_has_what_the_runs_measured(whole):
    rows = json.loads((whole.folder / "results.json").read_text())["rows"]
    runs = {row["mechanism"]: row for row in rows if row["kind"] == "run"}
    assert list(runs) == NAMES
    assert [runs[name]["host"]["rotary"] for name in NAMES] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [runs[name]["series"] for name in NAMES] == [name.removesuffix(" 16") for name in NAMES]
    table = table_of(whole)["rows"]
    assert [(row["mechanism"], row["positions"], row["canon"]) for row in table] == [
        ("softmax", "rotary", "none"), ("softmax", "rotary", "AC"), ("softmax", "none", "none"),
        ("softmax", "none", "AC"), ("elu", "none", "none"), ("elu", "none", "AC")]  # fmt: skip
    for row in table:
        canon = "" if row["canon"] == "none" else f"+{row['canon']}"
        scores = row["scores"]["16"]
        found = runs[f"{row['mechanism']}{canon} {row['positions']} 16"]["metrics"]
        assert {"legal": found["legal"], "exact_match": found["exact_match"]}.items() <= scores.items()
        assert 0 <= scores["written"] <= 100
        assert (row["gain"] is None) == (row["canon"] == "none")
    page = (whole.folder / "report.html").read_text()
    assert all(name in page for name in NAMES)


def test_started_again_it_trains_nothing(whole, monkeypatch):
    before = table_of(whole)["rows"]
    monkeypatch.setattr(text_module, "train_text", lambda *_, **__: pytest.fail("trained again"))
    assert whole.run(QUIET) == 0
    assert table_of(whole)["rows"] == before


def test_gains_are_differences_and_means_are_over_seeds():
    config = replace(CONFIG, task="capo", set={}, mechanisms=("elu:none",), canon=("none", "A"), widths=(8,), samples=0)
    scores = {"elu none 8": (10, 20), "elu+A none 8": (40, 60)}
    rows = [{"kind": "run", "mechanism": name, "seed": seed, "metrics": {"bits": value, "share": 1.0}}
            for name, values in scores.items() for seed, value in enumerate(values)]  # fmt: skip
    rows += [{"kind": "cost", "mechanism": name, "parameters": 50} for name in scores]
    plain, canon = config.paper_table(rows)
    assert plain["scores"]["8"] == {"bits": 15, "share": 1.0, "bits_per_parameter": 0.3}
    assert canon["gain"] == {"8": 35}


def test_without_final_runs_the_table_has_what_chose_the_rates(tmp_path):
    config = replace(
        CONFIG, output=tmp_path / "rates", lr=(1e-2, 1e-3), mechanisms=("elu:none",), samples=0, final=False
    )
    assert config.run(QUIET) == 0
    assert not list(config.folder.rglob("*.safetensors"))
    rows = json.loads((config.folder / "results.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == ["sweep"] * 4
    table = table_of(config)
    assert "by which the learning rate was chosen" in table["meta"]["scored_on"]
    assert [row["canon"] for row in table["rows"]] == ["none", "AC"]
    for row, name in zip(table["rows"], ("elu none 16", "elu+AC none 16"), strict=True):
        tried = {f"{one['lr']:g}": one for one in rows if one["mechanism"] == name}
        assert row["rates"]["16"] == {lr: one["validation"] for lr, one in tried.items()}
        best = max(tried, key=lambda lr, tried=tried: (tried[lr]["validation"], -float(lr)))
        metrics = tried[best]["validation_metrics"]
        assert row["scores"]["16"] == {name: metrics[name] for name in ("exact_match", "legal")}
    assert replace(config, final=True, canon=("none",)).run(QUIET) == 0  # the runs that chose a rate are the final ones


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": ("alibi",)}, "positions: must be one of rotary, quarter, none"),
        ({"mechanisms": ("softmax:alibi",)}, "positions: must be one of"),
        ({"task": "mano", "set": {}}, "samples: are checked for lano and brevo"),
        ({"samples": 0, "final": False}, "name several with --lr"),
        ({"lr": (1e-2, 1e-3), "final": False}, "samples: must be 0 with --no-final"),
    ],
)
def test_a_wrong_option_is_named(changes, words):
    with pytest.raises(OptionError, match=words):
        replace(CONFIG, **changes)


def parsed(task, scale, **given):
    return Synth.parse({"task": task, "scale": scale, "device": "cpu", **given})


@pytest.mark.parametrize(
    ("task", "schedule", "eps", "tied"),
    [("depo", "cosine", 1e-6, False), ("brevo", "cosine", 1e-6, False), ("capo", "cosine", 1e-8, True),
     ("mano", "cosine", 1e-8, False), ("lano", "linear", 1e-8, False)],
)  # fmt: skip
def test_the_scale_of_the_paper_is_the_papers(task, schedule, eps, tied):
    found = parsed(task, "paper")
    assert (found.schedule, found.eps) == (schedule, eps)
    shapes = [host.shape for host in found.hosts.values()]
    assert {shape["hidden_size"]: shape["num_attention_heads"] for shape in shapes} == {512: 8, 768: 12}
    assert all(shape["num_hidden_layers"] == 8 for shape in shapes)
    assert all(shape.get("tie_word_embeddings", False) == tied for shape in shapes)
    assert len(found.shown_metrics()) == (3 if task == "depo" else len(METRICS[task]))


@pytest.mark.parametrize("task", METRICS)
@pytest.mark.parametrize("scale", SCALES)
def test_small_scales_are_alike_whatever_the_recipe(task, scale):
    found = parsed(task, scale)
    settings, steps, batch_size = BUDGETS[scale][task]
    assert (found.schedule, found.eps, found.weight_decay, found.betas) == ("cosine", 1e-8, 0.03, (0.9, 0.98))
    assert (found.steps, found.batch_size, found.warmup_steps) == (steps, batch_size, round(0.05 * steps))
    assert found.made == text_task(task, **settings)
    assert found.made.metric == METRICS[task][0]
    assert {host.shape["num_attention_heads"] for host in found.hosts.values()} == {2}
    other = parsed(task, scale, schedule="linear", steps="40", warmup_steps="7", lr="1e-3")
    assert (other.schedule, other.steps, other.warmup_steps, other.lr) == ("linear", 40, 7, (1e-3,))


def test_tied_embeddings_are_counted_once():
    task = text_task("capo", people=10)
    host = Host(size="base", width=64, depth=1, head_dim=64)
    tied, apart = (count_parameters(create_host(replace(host, tied=t), task, 0)) for t in (True, None))
    assert apart - tied == 64 * task.vocabulary


class Writer:
    """In the place of a model: writes what it was told to."""

    device = torch.device("cpu")

    def __init__(self, rows):
        self.rows = rows

    def generate(self, prompts, **_):
        return torch.cat([prompts, torch.tensor(self.rows)], 1)


def test_what_is_written_is_checked():
    lano = text_task("lano", root=9, length=16)
    rows = [[1, 2, 1, 0], [3, 3, 0, 0], [1, 2, 0, 0], [3, 3, 3, 3]]  # the last one has no end
    assert share_right(Writer(rows), lano, 4) == 50
    brevo = text_task("brevo", nodes=4, length=32)
    questions = brevo.questions(20)
    eos, size = brevo.bos + 3, 8
    answers = []
    for number, question in enumerate(questions):
        mark = question.index(brevo.bos + 1)
        edges = list(zip(question[1:mark:2], question[2:mark:2], strict=True))
        order = []

        def add(node, edges=edges, order=order):
            for parent, child in edges:
                if child == node and parent not in order:
                    add(parent)
            order.append(node)

        add(question[mark + 1])
        order = order[::-1] if number % 2 and len(order) > 1 else order
        answers.append((order, [*order, *[eos] * (size - len(order))]))
    right = sum(not number % 2 or len(order) == 1 for number, (order, _) in enumerate(answers))
    assert share_right(Writer([row for _, row in answers]), brevo, 20) == 100 * right / 20
    assert 0 < right < 20


def test_the_command_plans_and_names_what_is_wrong(tmp_path, capsys):
    words = ["lab", "synth", "mano", "--device", "cpu", "--scale", "cpu", "--mechanisms", "softmax", "--positions",
             "none", "--depth", "1", "--widths", "16", "--steps", "5", "--output", str(tmp_path / "x"), "--plan",
             "--set", "length=32", "--lr", "1e-3,3e-3,1e-2", "--seeds", "2", "--jobs", "4"]  # fmt: skip
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("8 runs x ")  # of two seeds the first is trained while rates are chosen
    assert not (tmp_path / "x").exists()
    assert main(["lab", "synth", "memo"]) == 2
    assert "must be one of depo, brevo" in capsys.readouterr().err


@pytest.mark.parametrize("canon", [None, "ABCD"])
@pytest.mark.parametrize(
    ("mechanism", "rotary"), [("softmax", 1.0), ("softmax", 0.0), ("gated", 0.0), ("mlstm", 0.0), ("zeros", 0.0)]
)
def test_a_step_can_be_recorded(mechanism, rotary, canon):
    """Nothing in a training step of these hosts asks the host for a number."""
    task = text_task("depo", letters=8, word_length=(1, 1), nodes=4, hops=2, length=32)
    host = Host(size="small", mechanism=mechanism, canon=canon, width=64, depth=1, heads=2, rotary=rotary)
    network = TextNetwork(create_host(host, task, 0), task).to("meta").train()
    tokens, rows = (torch.zeros(shape, dtype=torch.int64, device="meta") for shape in ((2, 32), (12,)))
    with HostAsks() as watch:
        loss, _ = network(Sequences(tokens, tokens, None), rows)
        loss.backward()
    assert watch.heard == []
    assert all(parameter.grad is not None for parameter in network.parameters())
