"""The laboratory of controlled tasks end to end: planned, trained through comparisons, merged, tabled; and resumed."""

import json
from concurrent.futures import Future
from dataclasses import replace
from io import StringIO

import pytest
import torch
from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.lab.theory.synth.budgets import LAB_TASKS, SCALES, budget, shown_metrics
from linattn.lab.theory.synth.merge import merged
from linattn.lab.theory.synth.plan import Plan, make_plan
from linattn.lab.theory.synth.run import run
from linattn.lab.theory.synth.settings import SynthConfig
from linattn.lab.theory.synth.table import paper_table
from linattn.lab.theory.synth.written import share_right
from rich.console import Console
from typer.testing import CliRunner

from linattn.lab.cli.main import app
from linattn.lab.compare import cells
from linattn.lab.compare import compare as compare_module
from linattn.lab.compare.text import costs
from linattn.lab.compare.text import subject as text_subject
from linattn.lab.tasks.text import text_task
from linattn.lab.theory.synth import plan, pool
from linattn.lab.theory.synth import run as lab_run
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.hosts import HostOptions, count_parameters, create_host
from linattn.lab.train.text.recipes import create_task
from linattn.support.options import OptionError

CONFIG = SynthConfig(
    TextCompareConfig(
        "brevo", {"nodes": 4, "length": 32, "test_examples": 8}, ("softmax", "elu:none"), (None, "AC"), (16,),
        HostOptions("pico", depth=1, heads=1),
        train=TextConfig(steps=2, batch_size=4, lr=1e-2, warmup_steps=0), seeds=1,
    ),
    metrics=("exact_match", "legal"),
    samples=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    output = tmp_path_factory.mktemp("lab") / "brevo"
    config = replace(CONFIG, shared=replace(CONFIG.shared, output=output))
    patch, screen = pytest.MonkeyPatch(), StringIO()
    patch.setattr(costs, "MIN_SECONDS", 0.0)
    patch.setattr(compare_module, "finish", lambda *_: None)  # pages of the parts: comparisons have their own tests
    assert run(config, Console(file=screen, width=160)) == 0
    patch.undo()
    return config, screen.getvalue()


def test_every_contender_is_there_with_its_positions(whole):
    config, text = whole
    results = json.loads((config.output / "results.json").read_text())
    names = ["softmax rotary 16", "softmax+AC rotary 16", "softmax none 16", "softmax+AC none 16", "elu none 16",
             "elu+AC none 16"]  # fmt: skip
    assert [entry["mechanism"] for entry in results["mechanisms"]] == names
    assert sorted(row["mechanism"] for row in results["rows"]) == sorted(names)
    assert results["meta"]["finished"]
    rotary = json.loads((config.output / "positions-rotary" / "settings.json").read_text())
    assert rotary["rotary"] == 1.0
    page = (config.output / "report.html").read_text()
    assert all(name in page for name in names)
    assert text.startswith("6 runs x ")
    assert "of 3 written are right" in text


def test_the_table_has_what_the_runs_measured(whole):
    config, text = whole
    results = json.loads((config.output / "results.json").read_text())
    table = json.loads((config.output / "table.json").read_text())["rows"]
    assert [(row["mechanism"], row["positions"], row["canon"]) for row in table] == [
        ("softmax", "rotary", "none"), ("softmax", "rotary", "AC"), ("softmax", "none", "none"),
        ("softmax", "none", "AC"), ("elu", "none", "none"), ("elu", "none", "AC")]  # fmt: skip
    measured = {row["mechanism"]: row["epochs"][-1]["metrics"] for row in results["rows"]}
    for row in table:
        canon = "" if row["canon"] == "none" else f"+{row['canon']}"
        found = measured[f"{row['mechanism']}{canon} {row['positions']} 16"]
        assert row["scores"]["16"]["legal"] == found["legal"]
        assert row["scores"]["16"]["exact_match"] == found["exact_match"]
        assert 0 <= row["scores"]["16"]["written"] <= 100
        assert (row["gain"] is None) == (row["canon"] == "none")
    assert "canon adds" in text


def test_started_again_it_trains_nothing(whole, monkeypatch):
    config, _ = whole
    before = (config.output / "table.json").read_bytes()
    seen = []
    train = text_subject.train_text
    monkeypatch.setattr(
        text_subject, "train_text",
        lambda *args, **options: seen.append(1) or train(*args, **options | {"on_step": pytest.fail}),
    )  # fmt: skip
    monkeypatch.setattr(compare_module, "finish", lambda *_: None)
    monkeypatch.setattr(lab_run, "write_report", lambda folder: folder)
    assert run(replace(config, samples=0), Console(file=StringIO()), measure=False) == 0
    assert len(seen) == 6
    now = json.loads((config.output / "table.json").read_text())["rows"]
    then = json.loads(before)["rows"]
    assert [{**row["scores"]["16"], "written": None} for row in now] == [
        {**row["scores"]["16"], "written": None} for row in then
    ]


def test_gains_are_differences_and_means_are_over_seeds():
    def part(kind):
        entries = [{"mechanism": n, "pattern": "elu", "canon": c, "width": 8, "series": n[:-2], "parameters": 50}
                   for n, c in (("elu 8", None), ("elu+A 8", "A"))]  # fmt: skip
        scores = {"elu 8": (10, 20), "elu+A 8": (40, 60)}
        rows = [{"mechanism": n, "seed": s, "epochs": [{"metrics": {"bits": x}}]} for n, xs in scores.items()
                for s, x in enumerate(xs)]  # fmt: skip
        return {"meta": {"host": {}, "finished": True}, "mechanisms": entries, "rows": rows}

    plain, canon = paper_table(merged({"none": part("none")}), ("bits",))
    assert plain["scores"]["8"] == {"bits": 15, "bits_per_parameter": 0.3}
    assert canon["gain"] == {"8": 35}


def test_the_plan_counts_runs_and_seconds(monkeypatch):
    monkeypatch.setattr(plan, "seconds_of_runs", lambda part: dict.fromkeys(part.mechanisms, 10.0))
    shared = replace(CONFIG.shared, lrs=(1e-3, 3e-3, 1e-2), seeds=2, jobs=4)
    found = make_plan(replace(CONFIG, shared=shared))
    assert found == Plan(6 * (3 + 1), 240.0, 4)  # of two seeds the first is trained while rates are chosen
    assert found.words() == (
        "24 runs x 10.0 s of training = 240 s, 4 at a time: 60 s if they do not slow one another"
    )  # fmt: skip


def test_budgets_fit_their_tasks():
    for task in LAB_TASKS:
        for scale in SCALES:
            chosen = budget(task, scale)
            made = create_task(task, chosen.settings, chosen.recipe)
            assert made.metric == chosen.metrics[0]
            assert all(width % HostOptions(width=width, **chosen.host).shape["num_attention_heads"] == 0
                       for width in chosen.widths)  # fmt: skip
            assert len(shown_metrics(made, chosen)) == (3 if task == "depo" else len(chosen.metrics))
    small, paper = (budget("mano", scale) for scale in ("gpu", "paper"))
    assert small.training({})["warmup_steps"] == 60
    assert small.training({"warmup_steps": 7, "steps": 50})["warmup_steps"] == 7
    assert "warmup_steps" not in paper.training({"steps": 50})  # its recipe has one


@pytest.mark.parametrize(
    ("task", "schedule", "eps", "tied"),
    [("depo", "cosine", 1e-6, False), ("brevo", "cosine", 1e-6, False), ("capo", "cosine", 1e-8, True),
     ("mano", "cosine", 1e-8, False), ("lano", "linear", 1e-8, False)],
)  # fmt: skip
def test_the_scale_of_the_paper_is_the_papers(task, schedule, eps, tied, monkeypatch):
    found = configured(monkeypatch, task, "paper")
    assert (found.train.schedule, found.train.eps) == (schedule, eps)
    shapes = [found.host_of(name).shape for name in found.mechanisms]
    by_width = {shape["hidden_size"]: shape["num_attention_heads"] for shape in shapes}
    assert by_width == {512: 8, 768: 12}
    assert all(shape["num_hidden_layers"] == 8 for shape in shapes)
    assert all(shape.get("tie_word_embeddings", False) == tied for shape in shapes)


def test_tied_embeddings_are_counted_once(monkeypatch):
    found = configured(monkeypatch, "capo", "paper")
    host = replace(found.host, width=64, depth=1)
    task = text_task("capo", people=10)
    tied, apart = (count_parameters(create_host(replace(host, tied=t), task, 0)) for t in (True, None))
    assert apart - tied == 64 * task.vocabulary


@pytest.mark.parametrize("task", LAB_TASKS)
@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_small_scales_are_alike_whatever_the_recipe(task, scale, monkeypatch):
    found = configured(monkeypatch, task, scale)
    assert (found.train.schedule, found.train.eps) == ("cosine", 1e-8)
    assert found.settings == budget(task, scale).settings
    assert {found.host_of(name).shape["num_attention_heads"] for name in found.mechanisms} == {2}
    assert configured(monkeypatch, task, scale, "--schedule", "linear").train.schedule == "linear"


def configured(monkeypatch, task, scale, *options):
    """The comparison that the command makes."""
    seen = []
    monkeypatch.setattr(lab_run, "run", lambda config, *_, **__: seen.append(config.shared) or 0)
    called = CliRunner().invoke(app, ["lab", "synth", task, "--scale", scale, "--device", "cpu", *options])
    assert called.exit_code == 0, called.output
    return seen[0]


def test_wrong_positions_and_samples_are_named():
    with pytest.raises(OptionError, match="positions"):
        _ = replace(CONFIG, positions=("alibi",)).parts
    with pytest.raises(OptionError, match="samples"):
        share_right(None, text_task("mano", operations=2, length=32), 2)


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


def test_the_command_plans_and_names_what_is_wrong(tmp_path):
    words = ["lab", "synth", "mano", "--device", "cpu", "--scale", "cpu", "--mechanisms", "softmax", "--positions",
             "none", "--depth", "1", "--widths", "16", "--steps", "5", "--output", str(tmp_path / "x"), "--plan",
             "--set", "length=32"]  # fmt: skip
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert found.output.startswith("2 runs x ")
    assert not (tmp_path / "x").exists()
    wrong = CliRunner().invoke(app, ["lab", "synth", "memo"])
    assert wrong.exit_code == 2
    assert "depo" in wrong.output


class HereAndNow:
    """In the place of a pool of processes: runs what it gets at once, in this one."""

    def __init__(self, _, *, initializer, initargs, **others):
        initializer(*initargs)

    def submit(self, work, *arguments):
        future = Future()
        future.set_result(work(*arguments))
        return future

    def shutdown(self, **others):
        pass


@pytest.fixture
def here(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(pool, "ProcessPoolExecutor", HereAndNow)
    monkeypatch.setattr(pool.signal, "signal", lambda *_: None)
    monkeypatch.setattr(pool, "_TEXTS", {})
    yield monkeypatch
    torch.set_num_threads(threads)


def swept(output, **train):
    lrs = (1e-3, 1e-2)
    train = replace(CONFIG.shared.train, **train)
    return replace(CONFIG, shared=replace(CONFIG.shared, output=output, lrs=lrs, canons=(None,), train=train, jobs=2))


def test_one_pool_trains_all_that_comparisons_ask_for(here, tmp_path):
    config, said = swept(tmp_path), []
    assert pool.train_in_pool(config, said.append) == set()
    assert said[-1] == "6 of 6 runs"  # 3 contenders, 2 rates each, one of which is the final run
    for part in config.parts.values():
        texts = text_subject.Texts(part)
        trainer = texts.trainer(pytest.fail, lambda *_: pytest.fail("trained again"))
        tried = [trainer.run(cell) for cell in cells.sweep_cells(part)]
        best = cells.best_lrs(part, tried)
        final = [trainer.run(cell) for cell in cells.final_cells(part, best)]
        assert len(final) == len(part.mechanisms)
        assert all(found.status == "done" for found in (*tried, *final))


def test_a_failed_run_is_left_to_its_comparison(here, tmp_path):
    run_one = pool._run
    here.setattr(
        pool, "_run",
        lambda kind, cell: replace(run_one(kind, cell), status="failed") if kind == "none" else run_one(kind, cell),
    )  # fmt: skip
    config = swept(tmp_path)
    assert pool.train_in_pool(config, lambda words: None) == {"none"}


def test_without_final_runs_the_table_has_what_chose_the_rates(tmp_path, monkeypatch):
    shared = replace(CONFIG.shared, output=tmp_path / "rates", lrs=(1e-2, 1e-3), patterns=("elu:none",))
    config, screen = replace(CONFIG, shared=shared, samples=0, final=False), StringIO()
    assert run(config, Console(file=screen, width=160)) == 0
    assert screen.getvalue().startswith("4 runs x ")  # two contenders at two rates, no more
    part = tmp_path / "rates" / "positions-none"
    assert not (part / "runs").exists()
    assert not list(part.rglob("*.safetensors"))
    saved = json.loads((tmp_path / "rates" / "table.json").read_text())
    assert "learning rate was chosen by" in saved["meta"]["scored_on"]
    assert [row["canon"] for row in saved["rows"]] == ["none", "AC"]
    for row in saved["rows"]:
        name = "elu-16" if row["canon"] == "none" else f"elu+{row['canon']}-16"
        runs = {lr: json.loads((part / "sweep" / name / f"lr-{lr}-seed-0" / "result.json").read_text())
                for lr in ("0.01", "0.001")}  # fmt: skip
        assert row["rates"]["16"] == {lr: found["score"] for lr, found in runs.items()}
        best = max(runs, key=lambda lr: (runs[lr]["score"], -float(lr)))
        metrics = runs[best]["records"][-1]["metrics"]
        assert row["scores"]["16"] == {"exact_match": metrics["exact_match"], "legal": metrics["legal"]}
    train = text_subject.train_text
    monkeypatch.setattr(
        text_subject, "train_text", lambda *args, **options: train(*args, **options | {"on_step": pytest.fail})
    )
    assert run(config, Console(file=StringIO()), measure=False) == 0  # finished runs are taken without weights


def test_no_final_asks_for_several_rates_and_writes_no_samples():
    with pytest.raises(OptionError, match="name several with --lr"):
        replace(CONFIG, samples=0, final=False).check()
    with pytest.raises(OptionError, match="samples"):
        replace(CONFIG, shared=replace(CONFIG.shared, lrs=(1e-2, 1e-3)), final=False).check()


def test_a_contender_whose_rates_all_failed_has_no_final_run():
    part = replace(CONFIG.shared, patterns=("elu",), lrs=(1e-2, 1e-3))
    swept = [cells.CellResult(cell, "failed") for cell in cells.sweep_cells(part) if cell.mechanism == "elu 16"]
    assert len(swept) == 2
    assert pool._final(part, swept) == []
    swept[0].status, swept[0].score = "done", 5.0
    assert [cell.lr for cell in pool._final(part, swept)] == [swept[0].cell.lr]
