"""The laboratory of controlled tasks end to end: trained as a comparison, tabled; and resumed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from linattn.lab.command import main
from linattn.lab.compare import costs
from linattn.lab.compare import text as text_module
from linattn.lab.screen import Screen
from linattn.lab.tasks.text import text_task
from linattn.lab.theory.synth import BUDGETS, METRICS, SCALES, Synth
from linattn.support.options import OptionError

QUIET = Screen(quiet=True)
CONFIG = Synth(
    task="brevo", set={"nodes": 4, "length": 32, "test_examples": 8}, mechanisms=("softmax", "elu:none"),
    canon=("none", "AC"), widths=(16,), size="pico", depth=1, heads=1, steps=2, batch_size=4,
    warmup_steps=0, device="cpu", jobs=1, output=Path("x"),
)  # fmt: skip
NAMES = ["softmax rotary 16", "softmax+AC rotary 16", "softmax none 16", "softmax+AC none 16", "elu none 16",
         "elu+AC none 16"]  # fmt: skip


def results_of(config):
    return (json.loads((config.folder / name).read_text()) for name in ("results.json", "table.json"))


def test_the_table_has_what_the_runs_measured_and_started_again_it_trains_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "MIN_SECONDS", 0.0)
    config = replace(CONFIG, output=tmp_path)
    assert config.run(QUIET) == 0
    results, table = results_of(config)
    runs = {row["mechanism"]: row for row in results["rows"] if row["kind"] == "run"}
    assert list(runs) == NAMES
    assert [runs[name]["host"]["rotary"] for name in NAMES] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [runs[name]["series"] for name in NAMES] == [name.removesuffix(" 16") for name in NAMES]
    for row, name in zip(table["rows"], NAMES, strict=True):
        canon = "" if row["canon"] == "none" else f"+{row['canon']}"
        assert f"{row['mechanism']}{canon} {row['positions']} {row['width']}" == name
        found = runs[name]["metrics"]
        assert {"legal": found["legal"], "exact_match": found["exact_match"]}.items() <= row.items()
        assert ("gain" in row) == (row["canon"] == "AC")
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in NAMES)
    monkeypatch.setattr(text_module, "train_text", lambda *_, **__: pytest.fail("trained again"))
    assert config.run(QUIET) == 0
    assert list(results_of(config))[1]["rows"] == table["rows"]


def test_gains_are_differences_and_means_are_over_seeds():
    config = replace(CONFIG, task="capo", set={}, mechanisms=("elu:none",), canon=("none", "A"), widths=(8,))
    scores = {"elu none 8": (10, 20), "elu+A none 8": (40, 60)}
    rows = [{"kind": "run", "mechanism": name, "seed": seed, "metrics": {"bits": value, "share": 1.0}}
            for name, values in scores.items() for seed, value in enumerate(values)]  # fmt: skip
    rows += [{"kind": "cost", "mechanism": name, "parameters": 50} for name in scores]
    plain, canon = config.paper_table(rows)
    assert (plain["bits"], plain["share"], plain["bits_per_parameter"]) == (15, 1.0, 0.3)
    assert (canon["bits"], canon["gain"], "gain" in plain) == (50, 35, False)


def test_without_final_runs_the_table_has_what_chose_the_rates(tmp_path):
    config = replace(CONFIG, output=tmp_path / "rates", lr=(1e-2, 1e-3), mechanisms=("elu:none",), final=False)
    assert config.run(QUIET) == 0
    assert not list(config.folder.rglob("*.safetensors"))
    results, table = results_of(config)
    rows = results["rows"]
    assert [row["kind"] for row in rows] == ["sweep"] * 4
    assert "by which the learning rate was chosen" in table["meta"]["scored_on"]
    assert [row["canon"] for row in table["rows"]] == ["none", "AC"]
    for row, name in zip(table["rows"], ("elu none 16", "elu+AC none 16"), strict=True):
        tried = {f"{one['lr']:g}": one for one in rows if one["mechanism"] == name}
        assert row["rates"] == {lr: one["validation"] for lr, one in tried.items()}
        best = max(tried, key=lambda lr, tried=tried: (tried[lr]["validation"], -float(lr)))
        metrics = tried[best]["validation_metrics"]
        assert {name: metrics[name] for name in ("exact_match", "legal")}.items() <= row.items()
    assert replace(config, final=True, canon=("none",)).run(QUIET) == 0  # the runs that chose a rate are the final ones


def test_a_wrong_option_is_named(capsys):
    for changes, words in (
        ({"positions": ("alibi",)}, "positions: must be one of rotary, quarter, none"),
        ({"mechanisms": ("softmax:alibi",)}, "positions: must be one of"),
        ({"final": False}, "name several with --lr"),
    ):
        with pytest.raises(OptionError, match=words):
            replace(CONFIG, **changes)
    assert main(["lab", "synth", "memo"]) == 2
    assert "must be one of depo, brevo" in capsys.readouterr().err


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
