"""Rows of eager steps that are checked before the race, by several processes, and timed in it."""

from dataclasses import replace

import pytest
import torch
from linattn.lab.bench.kernels.clock import LEAST_CALLS, time_few
from linattn.lab.bench.models.beforehand import check_one, prepare, prepare_one, prepare_tasks
from linattn.lab.bench.models.cases import select, softmax_model
from linattn.lab.bench.models.rows import ModelRow, ModelsResult
from linattn.lab.bench.models.run import new_row, plan_of, run_models
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.start import run_apart
from linattn.lab.bench.models.subject import Subject

from lab.bench import fake_children as fake
from linattn.lab.bench.models import beforehand, run, start
from linattn.lab.bench.models import subject as subject_module

EAGER = "eager-graph"
CONFIG = ModelsConfig(
    device="cpu", cases=("nalaformer_xtiny-224", "nalaformer_xtiny_linear-224"), modes=(EAGER,), backend="eager",
    quick=True, processes=1,
)  # fmt: skip
FOUND = ("checked_against", "explain", "explain_of", "on_kernels", "beside",
         "calls", "parameters", "status", "reason", "shape", "unit")  # fmt: skip


def opened(config):
    result = ModelsResult(config.describe(["test"]))
    result.meta["runs"] = [{"date": "", "command": ""}, {"date": "", "command": ""}]
    return result


def silent(what):
    pass


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [("nalaformer_xtiny-224", "nala"), ("deit_tiny_lion-224", "softmax"), ("vit-224", "pola"),
     ("language-8192-b1", "gated-head")],
)  # fmt: skip
def test_a_row_that_is_checked_beforehand_is_the_row_that_the_race_would_have_found(name, mechanism, monkeypatch):
    (case,) = select((name,))
    case = replace(case, batch=2, pixels=64) if case.kind == "backbone" else case.quick()  # deeper than what is checked
    in_race = new_row(case, mechanism, EAGER, 0)
    Subject(CONFIG, case, mechanism, silent)._fill(in_race)
    assert 0 < in_race.error <= in_race.budget
    known = check_one((case, mechanism, EAGER), CONFIG)
    assert known.median_ms is None
    monkeypatch.setattr(subject_module, "look_at", None)  # once is enough
    monkeypatch.setattr(subject_module, "ModelTruth", lambda *args: None)
    subject = Subject(CONFIG, case, mechanism, silent)
    subject._fill(known)
    subject._work(known)
    for field in (*FOUND, "error", "budget", "worst_tensor"):
        assert getattr(known, field) == getattr(in_race, field), field
    assert known.peak_bytes == in_race.peak_bytes > 0
    assert known.median_ms > 0
    assert list(known.took) == ["looking at attention beforehand", "checking beforehand", "first step", "timing"]


def test_what_is_wrong_beforehand_is_wrong_in_the_race():
    (case, _) = CONFIG.selected()
    row = check_one((case, "nala", EAGER), CONFIG)
    row.error = 1.5 * row.budget
    Subject(CONFIG, case, "nala", silent)._fill(row)
    assert row.status == "WRONG"
    assert row.worst_tensor in row.reason


@pytest.mark.parametrize("changed", ["forward", "backward"])
def test_a_wrong_step_is_found_beforehand(changed, monkeypatch):
    (case, _) = CONFIG.selected()
    right = subject_module.make_step

    def wrong(*args):
        loss, *gradients = right(*args)()
        return lambda: (1.01 * loss, *gradients) if changed == "forward" else (loss, *(1.01 * g for g in gradients))

    monkeypatch.setattr(subject_module, "make_step", wrong)
    row = check_one((case, "nala", EAGER), CONFIG)
    assert row.error > row.budget
    assert (row.worst_tensor == "loss") == (changed == "forward")


def test_the_race_takes_what_is_checked_and_checks_the_rest(monkeypatch):
    met = {}

    class Counted(Subject):
        def measure(self, row):
            met[row.key] = row.error

    monkeypatch.setattr(run, "Subject", Counted)
    result = opened(CONFIG)
    keys = [(case.name, mechanism, mode) for case, mechanism, mode in plan_of(CONFIG, result)]
    result.checked = {key: ModelRow(*key, error=0.25, budget=1.0, run=1) for key in keys[:2]}
    run_models(CONFIG, result)
    assert met == {keys[0]: 0.25, keys[1]: 0.25, keys[3]: None}
    twin = result.find(*keys[2])
    assert (twin.same_as, twin.error) == (keys[0][0], 0.25)


@pytest.mark.usefixtures("quick_children")
def test_rows_are_checked_in_other_processes():
    result = opened(CONFIG)
    prepare(CONFIG, result, 120, silent)
    checked = result.checked
    hybrid, linear = CONFIG.selected()
    assert set(checked) == {(hybrid.name, "softmax", EAGER), (hybrid.name, "nala", EAGER), (linear.name, "nala", EAGER)}
    assert {row.run for row in checked.values()} == {1}
    note = result.meta["runs"][-1]["compiled_beforehand"]
    assert (note["of"], note["ended"], note["failed"]) == (3, 3, [])
    here = check_one((linear, "nala", EAGER), CONFIG)
    there = checked[linear.name, "nala", EAGER]
    assert {field: getattr(here, field) for field in FOUND} == {field: getattr(there, field) for field in FOUND}
    # What rounding leaves differs by a few percent with the number of threads a process has, and so may the worst.
    assert (here.error, here.budget) == pytest.approx((there.error, there.budget), rel=0.5)


def test_what_did_not_come_back_or_failed_is_left_to_the_race(monkeypatch):
    def some(target, tasks, *args, **options):
        first, second, _ = tasks  # the last had no time
        yield first, check_one(first, CONFIG), 1.0, ""
        yield second, None, 2.0, "OutOfMemoryError: CUDA out of memory"

    monkeypatch.setattr(beforehand, "in_parallel", some)
    result = opened(CONFIG)
    first, second, _ = prepare_tasks(plan_of(CONFIG, result), result)
    prepare(CONFIG, result, 120, silent)
    assert list(result.checked) == [(first[0].name, *first[1:])]
    note = result.meta["runs"][-1]["compiled_beforehand"]
    assert (note["of"], note["ended"]) == (3, 2)
    assert [(d["case"], d["seconds"], d["error"]) for d in note["failed"]] == [
        (second[0].name, 2.0, "OutOfMemoryError: CUDA out of memory")
    ]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory beside others"), RuntimeError("broken")])
def test_an_error_beforehand_is_no_verdict(error, monkeypatch):
    def fails(*args, **options):
        raise error

    monkeypatch.setattr(subject_module, "look_at", fails)
    monkeypatch.setattr(beforehand, "WAIT_SECONDS", 0)
    with pytest.raises(type(error), match=str(error)):
        prepare_one((CONFIG.selected()[0], "nala", EAGER), CONFIG)


def test_a_check_waits_for_the_memory_of_others(monkeypatch):
    right, calls, waits = subject_module.look_at, [], []

    def fails_twice(*args):
        calls.append(args)
        if len(calls) < 3:
            raise torch.OutOfMemoryError("others have it")
        return right(*args)

    monkeypatch.setattr(subject_module, "look_at", fails_twice)
    monkeypatch.setattr(beforehand.time, "sleep", waits.append)
    row = prepare_one((CONFIG.selected()[0], "nala", EAGER), CONFIG)
    assert 0 < row.error <= row.budget
    assert waits == [beforehand.WAIT_SECONDS] * 2


@pytest.mark.usefixtures("quick_children")
def test_every_child_of_a_race_knows_what_is_checked(monkeypatch):
    """The first dies; the one after it is not told less."""
    config = replace(CONFIG, cases=CONFIG.cases[:1])
    row = ModelRow(config.cases[0], "nala", EAGER, error=0.25, budget=1.0)
    asked = []

    def prepared(config, result, seconds, on_work, on_checked):
        asked.append(seconds)
        result.checked[row.key] = row

    monkeypatch.setattr(start, "prepare", prepared)
    result, rows = opened(config), []
    run_apart(config, result, on_row=rows.append, on_work=silent, target=fake.models_that_crash_once)
    assert [(r.mechanism, r.status, r.error) for r in rows] == [("softmax", "failed", None), ("nala", "ok", 0.25)]
    assert asked == [start.WARM_SHARE * config.seconds]
    run_apart(
        replace(config, processes=0), opened(config), on_row=rows.append, on_work=silent,
        target=fake.models_that_crash_once,
    )  # fmt: skip
    assert len(asked) == 1
    assert rows[-1].error is None


def test_each_model_is_checked_once_and_the_longest_first():
    config = ModelsConfig(cases=("presets-224", "presets-1024"), modes=(EAGER,))
    result = ModelsResult({})
    plan = plan_of(config, result)
    tasks = prepare_tasks(plan, result)
    names = [(softmax_model(c.name) if m == "softmax" else c.name, m) for c, m, _ in plan]
    assert sorted((softmax_model(c.name) if m == "softmax" else c.name, m) for c, m, _ in tasks) == sorted(set(names))
    pixels = [case.pixels for case, *_ in tasks]
    assert pixels == sorted(pixels, reverse=True)
    places = {(case.name, mechanism): place for place, (case, mechanism, _) in enumerate(tasks)}
    sizes = ("large", "base", "small", "tiny")
    for mechanism in ("softmax", "mirror"):
        order = [places[f"mirrorla_{size}-1024", mechanism] for size in sizes]
        assert order == sorted(order)
    families = [(case.size.partition("_")[0], mechanism) for case, mechanism, _ in tasks]
    assert len(set(families[:14])) == len(set(families)) == 14
    measured = ModelsResult({}, [ModelRow("nalaformer_tiny-224", "softmax", EAGER, median_ms=1.0)])
    fewer = prepare_tasks(plan_of(config, measured), measured)
    left = {(case.name, m) for case, m, _ in fewer}
    assert left == set(places) - {("nalaformer_tiny-224", "softmax")}  # nor its twin


@pytest.mark.parametrize(
    ("first", "each", "counts"),
    [
        (310.0, 300.0, [1, LEAST_CALLS]),  # longer than all that is to be measured
        (41.0, 40.0, [1, LEAST_CALLS]),
        (25.0, 4.0, [1, 1, 30]),  # the first has loaded the graph, and is no measure
        (10.0, 10.0, [1, 3, 12]),
    ],
)
def test_long_steps_are_run_as_often_as_it_takes(first, each, counts):
    asked, clock = [], [first]

    def timed(count):
        asked.append(count)
        return [clock.pop() if clock else each + 0.1 * n for n in range(count)]

    timing = time_few(timed, 120.0)
    assert asked == counts
    samples = torch.tensor([each + 0.1 * n for n in range(counts[-1])], dtype=torch.float64)
    exact = torch.quantile(samples, torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)).tolist()
    assert (timing.median, timing.p20, timing.p80) == pytest.approx(exact)
    assert timing.repeats == counts[-1]


def test_nothing_is_forgotten_that_was_not_compiled(monkeypatch):
    """To load what forgets compiled code takes seconds."""
    calls = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append(1))
    run.clean(CONFIG)
    Subject(CONFIG, CONFIG.selected()[0], "nala", silent)._step(EAGER)
    assert calls == []
    both = replace(CONFIG, modes=("compiled", EAGER))
    run.clean(both)
    Subject(both, CONFIG.selected()[0], "nala", silent)._step(EAGER)
    assert calls == [1, 1]
