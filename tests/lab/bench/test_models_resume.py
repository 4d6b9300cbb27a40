"""Rows that were checked beforehand but not measured: a run that ends early leaves them to the next one."""

import json
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from linattn.lab.bench.models.beforehand import check_one, prepare, prepare_tasks
from linattn.lab.bench.models.rows import ModelRow, ModelsResult
from linattn.lab.bench.models.run import as_checked, new_row, plan_of, run_models
from linattn.lab.bench.models.screen import measure_models, take_up
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.subject import Subject

from linattn.lab.bench.models import beforehand, run, screen, settings
from linattn.lab.bench.models import subject as subject_module
from linattn.support.files import write_json
from linattn.support.options import OptionError

ROOT = Path(__file__).parents[3]
EAGER = "eager-graph"
CONFIG = ModelsConfig(
    device="cpu", cases=("nalaformer_xtiny-224", "nalaformer_xtiny_linear-224"), modes=(EAGER,), backend="eager",
    quick=True, processes=1,
)  # fmt: skip
SOFTMAX = ("nalaformer_xtiny-224", "softmax", EAGER)
NALA = ("nalaformer_xtiny-224", "nala", EAGER)
OLD_NOTE = {"of": 1, "seconds": 2.0, "done": [{"case": "c", "mechanism": "m", "seconds": 1.0, "error": ""}]}


@dataclass(frozen=True)
class OnGpu(ModelsConfig):
    """As far as it is seen from outside of the race."""

    device: str = "cuda"

    def check(self):
        pass

    def describe(self, command=None):
        return CONFIG.describe(command)


class KilledError(Exception):
    pass


def silent(what):
    pass


def opened(*checked):
    result = ModelsResult(CONFIG.describe(["test"]), checked={row.key: row for row in checked})
    result.meta["runs"] = [{"date": "", "command": ""}]
    return result


def some(tasks_done, then=None):
    """Of :func:`in_parallel`: the first ones are checked, here and now."""

    def checks(target, tasks, *args, **options):
        for task in tasks[:tasks_done]:
            yield task, check_one(task, CONFIG), 1.0, ""
        if then is not None:
            raise then

    return checks


def test_what_is_checked_survives_the_end_of_a_run(tmp_path, monkeypatch):
    path, seen = tmp_path / "models.json", []

    def race(config, result, *, on_row, on_work, on_checked):
        prepare(CONFIG, result, 120, on_work, on_checked)
        seen.append(result)

    monkeypatch.setattr(screen, "run_apart", race)
    monkeypatch.setattr(beforehand, "in_parallel", some(2, KilledError()))
    monkeypatch.setattr(beforehand, "SECONDS_BETWEEN_SAVES", -1)
    config = OnGpu(cases=CONFIG.cases, modes=CONFIG.modes, quick=True)
    with pytest.raises(KilledError):
        measure_models(config, path, command=["test"])
    first, second = (row["case"] for row in json.loads(path.read_text())["checked"])

    tasks = []
    monkeypatch.setattr(beforehand, "in_parallel", lambda target, left, *args, **options: tasks.extend(left) or [])
    measure_models(config, path, resume=True, command=["test"])
    (taken,) = seen
    everything = prepare_tasks(plan_of(CONFIG, opened()), opened())
    assert [(case.name, *rest) for case, *rest in everything[:2]] == list(taken.checked)
    assert tasks == everything[2:], "neither what is known nor a twin of it"
    assert taken.meta["runs"][-1]["compiled_beforehand"]["of"] == 1

    # The race then looks at nothing again, and says which run has.
    monkeypatch.setattr(subject_module, "look_at", None)
    monkeypatch.setattr(subject_module, "ModelTruth", lambda *args: None)
    case, mechanism, mode = everything[0]
    row = as_checked(taken, new_row(case, mechanism, mode, taken.run))
    Subject(CONFIG, case, mechanism, silent)._fill(row)
    assert (row.case, row.status, row.run, row.checked_run) == (first, "ok", 1, 0)
    assert 0 < row.error <= row.budget
    assert row.median_ms > 0
    assert json.loads(path.read_text())["checked"][1]["case"] == second


@pytest.mark.parametrize(("seconds_between", "done", "saves"), [(-1.0, 3, [1, 2, 3, 3]), (1e9, 3, [3]), (-1.0, 0, [])])
def test_what_is_checked_is_saved_on_the_way_and_at_the_end(seconds_between, done, saves, monkeypatch):
    monkeypatch.setattr(beforehand, "in_parallel", some(done))
    monkeypatch.setattr(beforehand, "SECONDS_BETWEEN_SAVES", seconds_between)
    monkeypatch.setattr(Subject, "check", lambda self, row: None)
    result, counts = opened(), []
    prepare(CONFIG, result, 120, silent, lambda: counts.append(len(result.checked)))
    assert counts == saves


def test_a_row_is_of_one_code(tmp_path, monkeypatch):
    """What was measured stays; what was only checked counts as long as the code, the versions and the seed do."""
    path, earlier = tmp_path / "models.json", opened(ModelRow(*NALA, error=0.25, budget=1.0))
    earlier.rows.append(ModelRow(*SOFTMAX, median_ms=1.0))
    write_json(path, earlier.as_json())
    same = ModelsResult(CONFIG.describe(["test"]))
    take_up(same, path)
    assert (same.rows, same.checked) == (earlier.rows, earlier.checked)

    monkeypatch.setattr(settings, "source_digest", lambda: "changed")
    other = ModelsResult(CONFIG.describe(["test"]))
    take_up(other, path)
    assert (other.rows, other.checked) == (earlier.rows, {})
    assert NALA in [(case.name, *rest) for case, *rest in prepare_tasks(plan_of(CONFIG, other), other)]
    monkeypatch.undo()

    for change in ("device", "versions"):
        wrong = ModelsResult(CONFIG.describe(["test"]) | {change: "other"})
        with pytest.raises(OptionError, match="another device, other versions"):
            take_up(wrong, path)
        assert wrong.checked == {}
    with pytest.raises(OptionError, match="other settings"):
        take_up(ModelsResult(replace(CONFIG, seed=1).describe(["test"])), path)


@pytest.mark.parametrize(("status", "kept"), [("left out", True), ("failed", False), ("ok", False), ("WRONG", False)])
def test_what_is_checked_is_kept_as_it_was_until_it_is_measured(status, kept, monkeypatch):
    class Ends(Subject):
        def measure(self, row):
            row.status, row.reason, row.took["first step"] = status, "why", 240.0

    monkeypatch.setattr(run, "Subject", Ends)
    rows = [ModelRow(*key, error=0.25, budget=1.0, took={"checking beforehand": 1.0}) for key in (SOFTMAX, NALA)]
    result = opened(*deepcopy(rows))
    run_models(CONFIG, result)
    assert result.find(*NALA).took == {"checking beforehand": 1.0, "first step": 240.0}
    assert list(result.checked.values()) == (rows if kept else [])


def test_a_verdict_beyond_all_numbers_is_read_as_one(tmp_path):
    """A gradient that is missing is infinitely far off, and JSON has no word for it."""
    path, case = tmp_path / "models.json", CONFIG.selected()[0]
    row = check_one((case, "nala", EAGER), CONFIG)
    row.error, row.worst_tensor = float("inf"), "a gradient"
    write_json(path, opened(row).as_json())
    result = ModelsResult(CONFIG.describe(["test"]))
    take_up(result, path)
    assert result.checked == {NALA: row}
    known = as_checked(result, new_row(case, "nala", EAGER, 0))
    Subject(CONFIG, case, "nala", silent)._fill(known)
    assert (known.status, known.reason[:26]) == ("WRONG", "a gradient is off by inf, ")


def test_files_from_before_and_files_without_rows_are_read(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from readme_models import backbones_text

    path, old = tmp_path / "results" / "gpu" / "models.json", opened()
    old.meta["runs"][0]["compiled_beforehand"] = OLD_NOTE
    old.rows.append(ModelRow(*NALA, median_ms=1.0, per_second=1000.0))
    value = old.as_json()
    del value["checked"], value["meta"]["source"], value["rows"][0]["checked_run"]
    write_json(path, value)
    result = ModelsResult(CONFIG.describe(["test"]))
    take_up(result, path)
    assert (result.rows, result.checked) == (old.rows, {})
    assert result.as_json()["meta"]["runs"][0]["compiled_beforehand"] == OLD_NOTE
    assert "| `nalaformer_xtiny` | `nala` |  | 1,000/s |" in backbones_text(path)
    write_json(path, opened(ModelRow(*NALA, error=0.25, budget=1.0)).as_json())
    assert "Loss and gradients of 0 rows" in backbones_text(path)
