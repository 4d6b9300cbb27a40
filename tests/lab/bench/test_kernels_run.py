import json
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from linattn.lab.bench.kernels.bound import Bound, Contender
from linattn.lab.bench.kernels.cases import FLOOR, OURS, Goal, select
from linattn.lab.bench.kernels.chart import goal_over_floor
from linattn.lab.bench.kernels.check import Truth
from linattn.lab.bench.kernels.problems import bind_form, draw
from linattn.lab.bench.kernels.rows import ColdStart, KernelRow, KernelsResult
from linattn.lab.bench.kernels.run import open_run, run_kernels
from linattn.lab.bench.kernels.screen import kernels
from linattn.lab.bench.kernels.settings import KernelsConfig
from linattn.lab.bench.screen import Files
from rich.console import Console

from linattn.lab.bench.kernels import run
from linattn.support.options import OptionError

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
# Without kernels: what is tested is the race, and the interpreter is slow.
SMALL = KernelsConfig(
    device="cpu", dtype="float32", cases=("causal-4096", "relu-196"), contenders=("linattn chunked", "fla"), quick=True
)


def execute(config=SMALL, result=None, **hooks):
    result = result or KernelsResult(config.describe(["test"]))
    open_run(result)
    return run_kernels(config, result, **hooks)


def contenders_with(*extra):
    return lambda case, rivals=(): [Contender("linattn chunked", bind_form("chunked")), *extra]


def test_every_row_is_checked_timed_and_weighed():
    seen = []
    result = execute(on_row=seen.append)
    assert seen == result.rows
    assert result.right
    chunked = [row for row in result.rows if row.contender == "linattn chunked"]
    assert [(r.case, r.pass_name) for r in chunked] == [
        (case, p) for case in ("causal-4096", "relu-196") for p in ("forward", "forward+backward")
    ]
    for row in chunked:
        assert row.status == "ok"
        assert 0 <= row.error <= row.budget
        assert row.error_at_full_size <= 4 * row.budget
        assert 0 < row.p20_ms <= row.median_ms <= row.p80_ms
        assert row.over_floor == row.median_ms / row.floor_ms
        assert row.extra_over_qkvo >= 0
        assert (row.first_seconds is not None) == (row.pass_name == "forward+backward")
        assert (row.timed_by, row.called_ms) == ("calls", row.median_ms)
    assert result.meta["copy_bytes_per_second"] > 0
    assert result.meta["versions"].keys() >= {"triton", "fla-core", "mlstm_kernels", "torch"}


def test_an_absent_rival_is_named_with_the_reason(monkeypatch):
    for module in ("fla", "fla.ops", "fla.ops.linear_attn"):
        monkeypatch.setitem(sys.modules, module, None)  # also where it is installed
    result = execute(replace(SMALL, cases=("causal-4096",)))
    row = result.find("causal-4096", "fla chunk_linear_attn", "forward")
    assert row.status == "absent"
    assert "fla not usable: ModuleNotFoundError" in row.reason
    assert row.median_ms is None
    without = execute(replace(SMALL, cases=("causal-4096",), rivals=("torch",)))
    assert without.find("causal-4096", "fla chunk_linear_attn", "forward") is None


def test_a_kernel_that_is_missing_says_why(monkeypatch):
    monkeypatch.setattr("linattn.kernels.linear.reason_against", lambda *tensors: "not today")
    result = execute(replace(SMALL, cases=("relu-196",), contenders=("linattn triton",)))
    assert {(row.status, row.reason) for row in result.rows} == {("absent", "not today")}


def wrong_rival():
    def bind(case, tensors):
        right = bind_form("chunked")(case, tensors)
        return Bound(right.leaves, lambda: right.run() * 1.01)

    return Contender("a rival", bind, "fla")


def raising_rival():
    def bind(case, tensors):
        raise RuntimeError("no such\nkernel")

    return Contender("broken", bind, "fla")


def test_a_wrong_rival_is_flagged_and_still_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "make_contenders", contenders_with(wrong_rival(), raising_rival()))
    screen = StringIO()
    files = Files.in_folder(tmp_path, "kernels", chart=True)
    assert kernels(replace(SMALL, contenders=()), files, Console(file=screen, width=130)) == 0  # not ours
    rows = json.loads(files.json.read_text())["rows"]
    status = {(row["contender"], row["status"]) for row in rows}
    assert status == {("linattn chunked", "ok"), ("a rival", "WRONG"), ("broken", "failed")}
    wrong = next(row for row in rows if row["contender"] == "a rival")
    assert wrong["median_ms"] > 0
    assert "is off by" in wrong["reason"]
    assert {row["reason"] for row in rows if row["contender"] == "broken"} == {"RuntimeError: no such kernel"}
    assert "WRONG" in screen.getvalue()
    assert files.chart.exists()


def test_a_wrong_row_of_ours_ends_with_exit_code_one(monkeypatch, tmp_path):
    ours = replace(wrong_rival(), name=OURS)
    monkeypatch.setattr(run, "make_contenders", lambda case, rivals=(): [ours])
    screen = StringIO()
    files = Files.in_folder(tmp_path, "kernels", chart=False)
    assert kernels(replace(SMALL, contenders=()), files, Console(file=screen, width=80)) == 1
    assert "linattn triton in relu-196" in screen.getvalue()


def test_nan_is_wrong():
    (case,) = [c.quick() for c in select(("causal-4096",))]

    def bind(case, tensors):
        return Bound(dict(tensors), lambda: tensors["v"] * float("nan"))

    truth = Truth(case, CPU, torch.float32, 0)
    assert not truth.check(Contender("nan", bind), backward=False).ok


def test_ctrl_c_keeps_rows_and_resume_measures_the_rest(monkeypatch, tmp_path):
    def bind(case, tensors):
        if case.name.startswith("relu"):
            raise KeyboardInterrupt
        return bind_form("chunked")(case, tensors)

    def contenders(later):
        return lambda case, rivals=(): [Contender(OURS, bind_form("chunked")), Contender("later", later, "fla")]

    monkeypatch.setattr(run, "make_contenders", contenders(bind))
    config, screen = replace(SMALL, contenders=()), StringIO()
    files = Files.in_folder(tmp_path, "kernels", chart=False)
    assert kernels(config, files, Console(file=screen, width=130)) == 130
    assert "interrupted" in screen.getvalue()
    kept = json.loads(files.json.read_text())
    assert kept["meta"]["interrupted"] is True
    # This library in all cases first: a run that ends early has its rows.
    assert [(r["case"], r["contender"]) for r in kept["rows"]][::2] == [
        ("causal-4096", OURS), ("relu-196", OURS), ("causal-4096", "later"),
    ]  # fmt: skip

    monkeypatch.setattr(run, "make_contenders", contenders(bind_form("chunked")))
    assert kernels(config, files, Console(file=screen, width=130), resume=True) == 0
    after = json.loads(files.json.read_text())
    assert len(after["rows"]) == 8
    runs = {(r["case"], r["contender"]): r["run"] for r in after["rows"]}
    # As they were, but ours once more beside the rival that was missing: one run for what is compared.
    assert runs == {
        ("causal-4096", OURS): 0, ("causal-4096", "later"): 0, ("relu-196", OURS): 1, ("relu-196", "later"): 1,
    }  # fmt: skip
    assert [r for r in after["rows"] if r["run"] == 0] == [r for r in kept["rows"] if r["case"] == "causal-4096"]
    assert len(after["meta"]["runs"]) == 2
    with pytest.raises(OptionError, match="other settings"):
        kernels(replace(config, seed=1), files, Console(file=screen), resume=True)


def test_what_failed_is_tried_again_by_the_next_run(monkeypatch):
    monkeypatch.setattr(run, "make_contenders", contenders_with(raising_rival()))
    config = replace(SMALL, contenders=(), cases=("causal-4096",))
    result = execute(config)
    assert result.find("causal-4096", "broken", "forward").status == "failed"
    right = replace(raising_rival(), bind=bind_form("chunked"))
    monkeypatch.setattr(run, "make_contenders", contenders_with(right))
    execute(config, result)
    assert {(row.contender, row.status, row.run) for row in result.rows} == {
        ("linattn chunked", "ok", 0), ("broken", "ok", 1),
    }  # fmt: skip


def test_a_first_call_that_takes_too_long_is_stopped(monkeypatch):
    def bind(case, tensors):
        def run():
            while True:
                time.sleep(0.01)

        return Bound(dict(tensors), run)

    slow = Contender("slow", bind, "fla", first_seconds=0.2)
    monkeypatch.setattr(run, "make_contenders", contenders_with(slow))
    result = execute(replace(SMALL, contenders=(), cases=("causal-4096",)))
    rows = [row for row in result.rows if row.contender == "slow"]
    assert {(row.status, row.reason) for row in rows} == {("left out", "its first call was stopped after 0 s")}


def test_the_full_size_is_checked_at_its_last_head(monkeypatch):
    """What is wrong in one head only, and only at the size that is timed, is found."""
    (case,) = [replace(c, B=3, H=4, T=48, K=16, V=16) for c in select(("causal-token-4096",))]

    def bind(case, tensors):
        right = bind_form("chunked")(case, tensors)

        def run():
            factor = torch.ones(case.H)
            factor[-1] = 1.1 if case.H == 4 else 1.0
            return right.run() * factor[None, :, None, None]

        return Bound(right.leaves, run)

    truth = Truth(case, CPU, torch.float32, 0)
    tensors = draw(case, CPU, torch.float32, 0)
    grad = torch.ones_like(tensors["v"])
    wrong, right = Contender("x", bind), Contender("y", bind_form("chunked"))
    assert truth.check(wrong, backward=True).ok
    assert not truth.check_full(wrong.bind(case, tensors), tensors, grad, backward=True).ok
    assert truth.check_full(right.bind(case, tensors), tensors, grad, backward=True).ok


def test_what_time_does_not_allow_is_left_out_and_taken_up_later():
    result = execute(replace(SMALL, seconds=1e-9, contenders=("linattn chunked",)))
    assert {row.status for row in result.rows} == {"left out"}
    assert result.right
    execute(replace(SMALL, contenders=("linattn chunked",)), result)
    assert {row.status for row in result.rows} == {"ok"}
    assert len(result.rows) == 4


def row(case, contender, pass_name="forward", ms=1.0, **more):
    return KernelRow(case, contender, pass_name, median_ms=ms, floor_ms=0.5, over_floor=ms / 0.5, **more)


def test_goals_are_judged_by_rows_that_count():
    result = KernelsResult({"settings": {"quick": False}})
    result.rows = [
        row("causal-4096", OURS, ms=0.6, extra_over_qkvo=0.2),
        row("causal-4096", OURS, "forward+backward", ms=1.0, called_ms=3.0, timed_by="CUDA graph", extra_over_qkvo=0.2),
        row("causal-4096", "fla chunk_linear_attn", "forward+backward", ms=4.0, timed_by="CUDA graph"),
        row("causal-channel-4096", OURS, ms=1.0, called_ms=3.0, timed_by="CUDA graph"),
        row("causal-channel-4096", "fla chunk_gla", ms=4.0, called_ms=4.0, timed_by="calls", run=1),
        row("causal-norm-4096", OURS, "forward+backward", ms=1.0, called_ms=3.0, timed_by="CUDA graph"),
        row(
            "causal-norm-4096",
            "fla chunk_linear_attn, normalised",
            "forward+backward",
            ms=8.0,
            called_ms=8.0,
            timed_by="long calls",
        ),
        row("relu-196", OURS, status="WRONG"),
        row("pola-196", OURS, ms=1.5),
    ]
    result.cold = [ColdStart("causal-norm-4096", 3.0), ColdStart("pola-196", None, "Absent: no kernel")]
    found = {(o.case, o.what, o.goal): o for o in result.outcomes()}
    forward = found["causal-4096", "forward", "<= 1.25x floor"]
    assert (forward.value, forward.reached) == (pytest.approx(1.2), True)
    training = found["causal-4096", "forward+backward", "<= 0.5x fla chunk_linear_attn"]
    assert (training.value, training.factor, training.reached) == (0.25, 0.5, True)
    assert found["causal-4096", "memory, forward", "<= 15% of q, k, v, o"].reached is False
    assert found["causal-4096", "memory, forward+backward", "<= 30% of q, k, v, o"].reached is True
    uneven = found["causal-channel-4096", "forward", "<= 0.7x fla chunk_gla"]
    assert (uneven.value, uneven.reached) == (0.75, False)  # alike: both as Python calls them
    assert "cannot be captured" in uneven.reason
    long = found["causal-norm-4096", "forward+backward", "<= 0.35x fla chunk_linear_attn, normalised"]
    assert (long.value, long.reason) == (1 / 8, "")
    assert "another run" in uneven.reason
    assert found["causal-norm-4096", "cold start", "<= 10 s"].reached is True
    assert found["pola-196", "cold start", "<= 10 s"].reached is None
    wrong = found["relu-196", "forward", "<= 1.6x floor"]
    assert (wrong.value, wrong.reached) == (None, None)
    assert "WRONG" in wrong.reason
    mapped = found["pola-196", "forward", "<= 2x linattn triton in relu-196"]
    assert mapped.value == 1.5  # against the time of a wrong row, which is said
    assert "WRONG" in mapped.reason
    assert goal_over_floor(result, "causal-4096", "forward", Goal(1.25, FLOOR)) == 1.25
    place = goal_over_floor(result, "causal-4096", "forward+backward", select(("causal-4096",))[0].training[0])
    assert place == 0.5 * 4.0 / 0.5


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"quick": False}, "device"),
        ({"dtype": "float64"}, "dtype"),
        ({"cases": ("nothing",)}, "cases"),
        ({"seconds": 0}, "seconds"),
        ({"rivals": ("flash",)}, "rivals"),
        ({"processes": -1}, "processes"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_wrong_settings_name_the_option(change, option):
    with pytest.raises(OptionError) as caught:
        replace(SMALL, **change).check()
    assert caught.value.option == option


def test_the_tables_fit_a_narrow_window(tmp_path):
    screen = StringIO()
    files = Files.in_folder(tmp_path, "kernels", chart=False)
    kernels(replace(SMALL, contenders=("linattn chunked",)), files, Console(file=screen, width=80))
    assert max(len(line) for line in screen.getvalue().splitlines() if "results:" not in line) <= 80


def test_the_readme_tells_what_is_measured_and_missed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from readme_kernels import kernels_text

    meta = {"device": "a GPU", "date": "2026-01-01T00:00", "command": "linattn kernels"}
    meta |= {
        "versions": {"torch": "2", "triton": "3", "fla-core": "1"},
        "settings": {"quick": False, "dtype": "bfloat16"},
    }
    meta |= {"copy_bytes_per_second": 4e12, "matmul_per_second": 7e14}
    result = KernelsResult(meta)
    result.rows = [
        row("causal-4096", OURS, ms=0.9, error=1e-3, budget=4e-3, shape="B8 H16 T4096 D128"),
        row("causal-4096", "fla chunk_linear_attn", ms=2.0),
        row("causal-4096", "fla wrong", ms=0.1, status="WRONG"),
        row("causal-4096", "SDPA flash", ms=3.0),
    ]
    path = tmp_path / "results" / "gpu" / "kernels.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result.as_json()))
    text = kernels_text(path)
    assert "| `causal-4096` | B8 H16 T4096 D128 | 0.900 | 1.80 | 2.00 (fla chunk_linear_attn) | 3.00 |" in text
    assert "Not reached: `causal-4096` forward <= 1.25x floor: 1.80." in text
    assert "used at most 25% of their error budget" in text
    assert "Wrong: fla wrong in causal-4096." in text
