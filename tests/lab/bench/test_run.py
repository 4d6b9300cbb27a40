import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from linattn.lab.bench.rows import Result
from linattn.lab.bench.run import number_of_rows, run_bench
from linattn.lab.bench.screen import Files, bench
from linattn.lab.bench.settings import BenchConfig
from linattn.lab.bench.store import describe_run
from rich.console import Console

from linattn.lab.bench import limits, run
from linattn.lab.bench.contenders import make_contenders
from linattn.lab.bench.timing import Timing, measure_in_turns
from linattn.support.options import OptionError

SMALL = BenchConfig(
    lengths=(32, 64), impl=("recurrent", "reference"), heads=2, head_dim=8, min_seconds=0, min_repeats=2, max_gib=1
)


def execute(config=SMALL, **hooks):
    return run_bench(config, Result(describe_run(config, ["test"])), **hooks)


def with_run_of(name, change):
    """Contenders of which one runs otherwise."""

    def make(config):
        return [replace(c, run=change(c.run)) if c.name == name else c for c in make_contenders(config)]

    return make


def test_every_contender_gets_a_checked_row_per_length_and_pass():
    seen = []
    result = execute(on_row=seen.append)
    assert len(result.rows) == number_of_rows(SMALL) == 2 * 2 * 3
    assert seen == result.rows
    assert result.right
    for row in result.rows:
        assert row.status == "ok"
        assert 0 <= row.error <= row.budget
        assert 0 < row.p20_ms <= row.median_ms <= row.p80_ms
        assert row.repeats >= 2
        assert row.peak_over_qkvo == row.peak_bytes / (4 * 2 * row.length * 8 * 4)
        assert row.peak_over_qkvo >= 1
        assert row.checked_against == "fp64"
    assert {g["contender"] for g in result.growth()} == {"sdpa", "recurrent", "reference"}


def test_a_wrong_form_is_shown_as_wrong_with_exit_code_one(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "make_contenders", with_run_of("recurrent", lambda f: lambda inputs: f(inputs) * 1.001))
    screen = StringIO()
    files = Files.in_folder(tmp_path, "r", chart=False)
    assert bench(SMALL, files, Console(file=screen, width=160)) == 1
    assert "WRONG" in screen.getvalue()
    assert "recurrent at T=32" in screen.getvalue()
    status = {(row["contender"], row["status"]) for row in json.loads(files.json.read_text())["rows"]}
    assert status == {("sdpa", "ok"), ("reference", "ok"), ("recurrent", "WRONG")}


def test_a_form_that_raises_fails_alone(monkeypatch):
    def broken(_):
        def raises(inputs):
            raise RuntimeError("no such kernel")

        return raises

    monkeypatch.setattr(run, "make_contenders", with_run_of("recurrent", broken))
    result = execute()
    assert not result.right
    assert {row.contender for row in result.rows if row.status == "ok"} == {"sdpa", "reference"}
    assert {row.reason for row in result.rows if row.status == "failed"} == {"RuntimeError: no such kernel"}


def test_ctrl_c_keeps_finished_rows(monkeypatch, tmp_path):
    def interrupt_at_64(form):
        def interrupted(inputs):
            if inputs.length == 64:
                raise KeyboardInterrupt
            return form(inputs)

        return interrupted

    monkeypatch.setattr(run, "make_contenders", with_run_of("recurrent", interrupt_at_64))
    screen = StringIO()
    files = Files.in_folder(tmp_path, "r", chart=True)
    assert bench(SMALL, files, Console(file=screen, width=160)) == 130
    data = json.loads(files.json.read_text())
    assert data["meta"]["interrupted"] is True
    assert {row["length"] for row in data["rows"]} == {32}
    assert len(data["rows"]) == 6
    assert "interrupted" in screen.getvalue()
    assert files.chart.exists()


def test_what_costs_too_much_is_left_out_with_the_reason():
    result = execute(replace(SMALL, lengths=(64, 4096), max_gib=0.05, backward=False, memory=False))
    rows = {(row.contender, row.length): row for row in result.rows}
    assert rows["reference", 64].status == "ok"
    left_out = rows["reference", 4096]
    assert left_out.status == "left out"
    assert "GiB, limit 0.05 GiB" in left_out.reason
    assert left_out.median_ms is None
    assert rows["sdpa", 4096].status == "ok"
    assert result.right  # left out is not wrong


def test_slow_calls_are_left_out_by_time(monkeypatch):
    monkeypatch.setattr(limits, "seconds_of", lambda call, device: 1.0)
    result = execute(replace(SMALL, max_seconds=0.5))
    assert {row.status for row in result.rows if row.contender == "recurrent"} == {"left out"}
    assert "s a call, limit 0.5 s" in next(row.reason for row in result.rows if row.contender == "recurrent")


def test_repeats_are_counted_and_taken_in_turns():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = measure_in_turns(calls, torch.device("cpu"), min_seconds=0, min_repeats=3)
    assert order == list("aabb") + list("ab") * 3  # two warm-up calls each, then rounds
    assert timings["a"].repeats == 3


def test_quantiles_of_known_samples():
    timing = Timing.of([float(i) for i in range(11)])
    assert (timing.median, timing.p20, timing.p80, timing.repeats) == (5, 2, 8, 11)
    assert Timing.of([4.0]) == Timing(4, 4, 4, 1)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"lengths": ()}, "lengths"),
        ({"lengths": (0,)}, "lengths"),
        ({"impl": ("fast",)}, "impl"),
        ({"impl": ()}, "impl"),
        ({"mechanisms": ("nobody",)}, "mechanisms"),
        ({"decay": "slow"}, "decay"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"heads": 0}, "heads"),
        ({"max_gib": 0}, "max_gib"),
    ],
)
def test_wrong_settings_name_the_option(change, option):
    with pytest.raises(OptionError) as caught:
        replace(SMALL, **change).check()
    assert caught.value.option == option
