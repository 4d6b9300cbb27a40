import time

import pytest
import torch
from linattn.lab.bench.children import in_parallel, supervise
from linattn.lab.bench.choices import watch_choices
from linattn.lab.bench.kernels.cases import OURS
from linattn.lab.bench.kernels.rows import KernelsResult
from linattn.lab.bench.kernels.run import open_run
from linattn.lab.bench.kernels.settings import KernelsConfig
from linattn.lab.bench.kernels.start import run_apart
from linattn.lab.bench.kernels.warm import warm, warm_tasks

from lab.bench import fake_children as fake
from linattn.mechanisms.registry import create_mechanism

QUICK = KernelsConfig(device="cpu", dtype="float32", cases=("causal-4096",), quick=True, rivals=("torch", "fla"))


def test_a_child_that_ends_well_is_heard_to_its_end():
    heard, deaths = [], []
    supervise(fake.echo, lambda: ("a", "b"), lambda *event: heard.append(event), deaths.append, silent_seconds=60)
    assert heard == [("word", "a"), ("word", "b")]
    assert deaths == []


@pytest.mark.usefixtures("quick_children")
def test_a_crash_and_a_broken_gpu_are_told_and_the_next_child_goes_on():
    heard, deaths = [], []

    def arguments():
        return (len(deaths) + 1,)

    def died(reason):
        deaths.append(reason)
        return True

    supervise(fake.crash_until_third, arguments, lambda *event: heard.append(event), died, silent_seconds=60)
    assert heard == [("attempt", 1), ("attempt", 2), ("attempt", 3)]
    assert deaths == ["the process was ended by SIGSEGV", "the GPU answers no more after an error"]


@pytest.mark.usefixtures("quick_children")
def test_a_child_that_hangs_is_ended():
    deaths = []
    begin = time.monotonic()
    supervise(fake.hang, tuple, lambda *event: None, deaths.append, silent_seconds=1)
    assert deaths == ["no sign of life for 1 s"]
    assert time.monotonic() - begin < 50


def test_tasks_run_in_parallel_and_a_failing_one_costs_itself(tmp_path):
    found = in_parallel(
        fake.square_unless_odd, range(6), (str(tmp_path),), processes=2, seconds=60, environment={"LINATTN_TEST": "yes"}
    )
    values, errors = {}, {}
    for task, value, _, error in found:
        values[task], errors[task] = value, error
    assert values == {0: 0, 1: None, 2: 4, 3: None, 4: None, 5: None}
    assert errors == {
        0: "", 1: "ValueError: 1 is odd", 2: "", 3: "ValueError: 3 is odd", 4: "the process ended with exit code 3",
        5: "ValueError: 5 is odd",
    }  # fmt: skip
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "0 yes", "2": "4 yes"}


@pytest.mark.usefixtures("quick_children")
def test_after_a_broken_gpu_the_next_task_has_a_process_of_its_own():
    first, broken, last = in_parallel(fake.break_the_gpu_at_one, range(3), (), processes=1, seconds=60)
    assert broken == (1, None, 0.0, "the GPU answers no more after an error")
    assert (first[0], last[0], first[3], last[3]) == (0, 2, "", "")
    assert first[1] != last[1]


@pytest.mark.usefixtures("quick_children")
def test_what_does_not_end_in_time_is_ended():
    begin = time.monotonic()
    assert list(in_parallel(fake.sleep, [60], (), processes=1, seconds=1)) == []
    assert time.monotonic() - begin < 50


@pytest.mark.usefixtures("quick_children")
def test_a_race_survives_a_contender_that_takes_its_process_down():
    result, rows = KernelsResult(QUICK.describe(["test"])), []
    open_run(result)
    run_apart(QUICK, result, on_row=rows.append, on_work=lambda what: None, target=fake.race_that_crashes_once)
    assert [(r.contender, r.pass_name, r.status) for r in rows] == [
        (OURS, "forward", "failed"), (OURS, "forward+backward", "failed"),
        ("linattn chunked", "forward", "ok"), ("linattn chunked", "forward+backward", "ok"),
    ]  # fmt: skip
    assert rows[0].reason == "the process was ended by SIGKILL"
    assert result.rows == rows
    assert result.meta["copy_bytes_per_second"] == 1e9


def test_each_thing_is_compiled_once_beforehand():
    config = KernelsConfig(cases=("causal-4096", "causal-32768", "causal-2048", "pola-196"))
    tasks = warm_tasks(config, KernelsResult({}))
    fla = [case for case, name in tasks if name == "fla chunk_linear_attn"]
    assert sorted(fla) == ["causal-2048", "causal-4096"]  # by width: 32768 has that of 4096
    assert tasks[: len(fla)] == [(case, "fla chunk_linear_attn") for case in fla]  # the longest first
    assert {case for case, name in tasks if name == OURS} == set(config.cases)
    assert ("pola-196", "torch.compile") in tasks
    assert not any("SDPA" in name or name == "eager" for _, name in tasks)


@pytest.mark.usefixtures("quick_children")
def test_what_was_compiled_beforehand_is_written_down():
    result, said = KernelsResult(QUICK.describe(["test"])), []
    open_run(result)
    config = KernelsConfig(device="cpu", dtype="float32", cases=QUICK.cases, quick=True, processes=1)
    warm(config, [("causal-4096", "linattn chunked"), ("causal-4096", "nobody")], result, 60, said.append)
    note = result.meta["runs"][-1]["compiled_beforehand"]
    assert (note["of"], note["ended"]) == (2, 2)
    assert [(d["contender"], d["error"]) for d in note["failed"]] == [
        ("nobody", "Absent: no contender nobody in causal-4096")
    ]
    assert said[-1].startswith("compiled 2 of 2")


@pytest.mark.parametrize("impl", ["chunked", "recurrent"])
def test_choices_of_a_mechanism_are_heard(impl):
    mechanism = create_mechanism("pola", num_heads=2, head_dim=8, impl=impl)
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    with watch_choices() as heard:
        mechanism(q, k, v)
    assert heard
    assert {choice.impl for choice in heard} == {impl}
    with watch_choices() as later:
        pass
    mechanism(q, k, v)
    assert later == []  # nobody listens any more
