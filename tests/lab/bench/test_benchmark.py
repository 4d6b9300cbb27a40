"""What all benchmarks share: cases that are kept, rows of what cannot be measured, options, the command line."""

import json
import os
import time
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from linattn.lab.bench import benchmark
from linattn.lab.bench.attention import Attention
from linattn.lab.bench.benchmark import Benchmark
from linattn.lab.bench.blocks import Blocks
from linattn.lab.bench.check import Verdict, judge
from linattn.lab.bench.decoding import Decoding
from linattn.lab.bench.kernels import Kernels
from linattn.lab.bench.models import Models, Throughput
from linattn.lab.bench.timing import Unmeasured
from linattn.lab.command import main
from linattn.lab.experiment import load_results
from linattn.lab.screen import Screen
from linattn.support.config import option
from linattn.support.machine import cores
from linattn.support.options import OptionError


@dataclass(frozen=True, kw_only=True)
class Toy(Benchmark):
    """One number a case; a case may be one that cannot be measured."""

    what: tuple[str, ...] = option(("fine",), affects=False)

    name: ClassVar[str] = "toy"
    keys: ClassVar[tuple[str, ...]] = ("what",)
    columns: ClassVar[tuple[str, ...]] = ("what", "median_ms")

    def cases(self):
        return [self.case(what=what) for what in self.what]

    def fill(self, case, work, row):
        if case["what"] in ERRORS:
            raise ERRORS[case["what"]]
        if case["what"] == "crash":
            os.kill(os.getpid(), 9)
        if case["what"] == "slow":
            time.sleep(60)
        row["median_ms"] = time.perf_counter()


ERRORS = {
    "full": torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate 2 GiB"),
    "full cpu": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    "absent": Unmeasured("absent", "no such kernel"),
    "long": Unmeasured("left out", "it takes\nlong"),
    "broken": ValueError("no such\nshape"),
}
CPU = {"device": "cpu"}


def test_a_row_says_why_it_has_no_numbers_and_costs_no_other(rows_of, tmp_path):
    rows = rows_of(Toy(what=("fine", *ERRORS, "fine too"), **CPU), tmp_path, code=1)
    assert [(row["what"], row["status"], row["reason"]) for row in rows] == [
        ("fine", "ok", ""), ("full", "out of memory", "Tried to allocate 2 GiB"),
        ("full cpu", "out of memory", str(ERRORS["full cpu"])), ("absent", "absent", "no such kernel"),
        ("long", "left out", "it takes long"),
        ("broken", "failed", "RuntimeError: ValueError: no such shape"), ("fine too", "ok", ""),
    ]  # fmt: skip
    # What is measured, and what cannot be, is kept; a failure is tried again.
    again = rows_of(Toy(what=("fine", *ERRORS, "fine too"), **CPU), tmp_path, code=1)
    assert again == rows
    assert len(list((tmp_path / "cases").iterdir())) == 6
    assert rows_of(Toy(what=("fine", "absent"), **CPU), tmp_path) == [rows[0], rows[3]]


def test_a_wrong_option_ends_all(rows_of, tmp_path, monkeypatch):
    monkeypatch.setitem(ERRORS, "wrong", OptionError("seed", "must be another"))
    with pytest.raises(OptionError, match="another"):
        rows_of(Toy(what=("wrong",), **CPU), tmp_path)


def test_another_seed_version_or_number_of_threads_is_measured_anew(rows_of, tmp_path, monkeypatch):
    first = rows_of(Toy(**CPU), tmp_path)
    assert rows_of(Toy(**CPU), tmp_path) == first
    assert rows_of(Toy(seed=1, **CPU), tmp_path) != first
    monkeypatch.setattr(benchmark, "source_digest", lambda folder: "changed")
    benchmark._code.cache_clear()
    second = rows_of(Toy(**CPU), tmp_path)
    assert second != first
    assert rows_of(Toy(threads=2, **CPU), tmp_path) != second


def test_what_time_does_not_allow_is_left_for_the_next_call(rows_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.25 * cores(), 0, 0))
    config = Toy(what=("a", "b", "c"), seconds=1e-9, **CPU)
    assert rows_of(config, tmp_path) == []
    said = capsys.readouterr().err
    assert "3 of 3 cases are left: the same command goes on" in said
    assert "busy" not in said
    assert [row["what"] for row in rows_of(Toy(what=("a", "b", "c"), **CPU), tmp_path)] == ["a", "b", "c"]


def test_crashes_and_what_hangs_cost_one_case_in_processes(rows_of, tmp_path, monkeypatch):
    monkeypatch.setattr(Toy, "most_seconds", 20.0)
    monkeypatch.setattr(Toy, "on_gpu", property(lambda self: True))  # so that a process measures
    monkeypatch.setattr(Toy, "place", lambda self: torch.device("cpu"))
    rows = rows_of(Toy(what=("crash", "slow", "fine"), **CPU), tmp_path, code=1)
    assert [(row["what"], row["status"], row["reason"]) for row in rows] == [
        ("crash", "failed", "the process was ended by SIGKILL"),
        ("slow", "failed", "it took longer than 20 s"), ("fine", "ok", ""),
    ]  # fmt: skip


def test_results_tell_how_they_were_made_and_are_published(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0, 0))
    config = Attention(
        lengths=(16, 32), impl=("chunked",), heads=2, head_dim=8, quick=True, seed=3,
        output=tmp_path / "runs", publish=tmp_path / "results",
    )  # fmt: skip
    assert config.run(Screen()) == 0
    assert "this machine is busy: a load of 99.0" in capsys.readouterr().err
    found = load_results(tmp_path / "results" / "attention-causal.json")
    assert found == load_results(tmp_path / "runs" / "results.json")
    meta = found["meta"]
    assert meta.keys() >= {"device", "cpu", "threads", "versions", "command", "date", "seed", "settings"}
    assert (meta["seed"], meta["load_average"], meta["settings"]["lengths"]) == (3, 99.0, [16, 32])
    assert (tmp_path / "results" / "attention-causal.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "runs" / "report.html").read_text()


def test_nan_is_the_worst_verdict_and_the_fullest_budget_comes_next():
    plain = {"a": 1.5, "b": 1.5}  # with eps: budgets of 4
    assert judge({"a": 1.0, "b": 3.0}, plain, 0.5, "") == Verdict(True, "b", 3.0, 4.0, "")
    assert judge({"a": float("nan"), "b": 3.9}, plain, 0.5, "").worst == "a"
    assert judge({"a": 4.1, "b": 1.0}, plain, 0.5, "").row()["status"] == "WRONG"


QUICK = {"device": "cpu", "quick": True}
WRONG = [
    (Attention, {"impl": ("magic",)}, "impl"), (Attention, {"impl": ()}, "impl"),
    (Attention, {"mechanisms": ("agent",)}, "mechanisms"), (Attention, {"device": "tpu"}, "device"),
    (Blocks, {"tokens": (0,)}, "tokens"), (Kernels, {"device": "cpu"}, "device"),
    (Kernels, QUICK | {"only": ("nothing",)}, "only"), (Models, {"device": "cpu"}, "device"),
    (Models, QUICK | {"only": ("vit-1",)}, "only"), (Models, QUICK | {"modes": ("fast",)}, "modes"),
    (Decoding, QUICK | {"mechanisms": ("agent",)}, "mechanisms"),
    (Throughput, QUICK | {"lengths": (8,), "tokens": 12}, "tokens"), (Throughput, {"device": "cpu"}, "device"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "named"), WRONG)
def test_a_wrong_option_is_named(kind, options, named):
    with pytest.raises(OptionError) as caught:
        kind(**options)
    assert caught.value.option == named


def test_the_commands_end_to_end(tmp_path, capsys):
    small = ["--lengths", "16", "--heads", "2", "--head-dim", "8", "--quick", "--impl", "chunked"]
    assert main(["bench", *small, "--output", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4
    assert main(["bench", "--lengths", "many"]) == 2
    assert "--lengths" in capsys.readouterr().err
    assert main(["kernels", "--device", "cpu"]) == 2
    assert "use --quick" in capsys.readouterr().err
    assert main(["mechanisms"]) == 0
    assert main(["doctor", "--json"]) == 0
    shown = capsys.readouterr().out
    assert all(f"extra {name}" in shown for name in ("lab", "vision", "graph", "export"))
