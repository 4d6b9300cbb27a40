"""`linattn kernels`: time of GPU kernels beside rivals and the floor."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar, Literal, Self

import torch

from linattn.lab.bench.benchmark import Benchmark, note, only_quick_on_cpu, setting
from linattn.lab.bench.contenders import FORWARD, TRAINING
from linattn.lab.bench.kernel_cases import (
    BY_NAME,
    COLD,
    COLD_CASES,
    IN_PLACE,
    OURS,
    Problem,
    goal_over_floor,
    outcomes,
    select,
)
from linattn.lab.bench.kernel_floors import floors, measure_ceilings, qkvo_bytes
from linattn.lab.bench.kernel_problems import Truth, draw
from linattn.lab.bench.kernel_rivals import PACKAGES, RIVALS, Contender, make_contenders
from linattn.lab.bench.memory import extra_bytes
from linattn.lab.bench.running import Row, shared
from linattn.lab.bench.timing import first_call, time_call
from linattn.lab.cases import Case, Outcome, Work
from linattn.lab.page.plots import Chart, Panel, styles
from linattn.support.config import option
from linattn.support.options import check_option

CEILINGS = ("copy_bytes_per_second", "matmul_per_second")


@dataclass(frozen=True, kw_only=True)
class Kernels(Benchmark):
    """Time of kernels on a GPU beside rivals and the floor.

    Every row is checked against fp64 in the same run. The floor is what memory and arithmetic allow at the least, by
    the copy bandwidth and the matmul rate that the run measures first. This library is timed in every case first, then
    what goals are set against, then the rest.

    Exit code: 0 all right, 1 a row of this library was WRONG or failed, 2 a bad option, 130 interrupted (what is done
    is kept).
    """

    only: tuple[str, ...] = option(
        (), "Cases, with commas; causal-* takes all that start so.", affects=False, default_text="all"
    )  # fmt: skip
    contenders: tuple[str, ...] = option(
        (), "Only contenders whose names start with these, with commas.", affects=False, default_text="all"
    )  # fmt: skip
    rivals: tuple[str, ...] = option(
        RIVALS, "Groups with commas, or none: torch (eager, compiled), softmax, fla and mlstm_kernels if installed.",
        affects=False,
    )  # fmt: skip
    dtype: Literal["", "bfloat16", "float16", "float32"] = option(
        "", "Type of the inputs.", default_text="bfloat16, on a CPU float32"
    )  # fmt: skip
    milliseconds: float = option(60.0, "Milliseconds of measured calls for a row.", above=0)
    cold: bool = option(True, "Time first calls in fresh processes with empty caches too.", affects=False)
    quick: bool = option(False, "Tiny shapes: shows that everything runs, times nothing.")

    name: ClassVar[str] = "kernels"
    keys: ClassVar[tuple[str, ...]] = ("case", "contender", "pass_name")
    columns: ClassVar[tuple[str, ...]] = (
        "case", "contender", "pass_name", "median_ms", "over_floor", "called_ms", "extra_over_qkvo", "budget"
    )  # fmt: skip
    packages: ClassVar[tuple[str, ...]] = PACKAGES
    most_seconds: ClassVar[float] = 300.0

    def check(self) -> None:
        super().check()
        select(self.only)
        for rival in self.groups:
            check_option("rivals", rival, RIVALS)
        only_quick_on_cpu(self, "kernels")

    def filled(self) -> Self:
        return replace(super().filled(), dtype=self.dtype or ("bfloat16" if self.on_gpu else "float32"))

    @property
    def groups(self) -> tuple[str, ...]:
        return () if self.rivals == ("none",) else self.rivals

    def problem(self, name: str) -> Problem:
        problem = BY_NAME[name]
        return problem.resized(1, 2, 64, 16) if self.quick else problem

    def cases(self) -> list[dict[str, Any]]:
        """This library in every case, then the contenders that goals refer to, then the rest."""
        ordered: list[tuple[int, dict[str, Any]]] = []
        for problem in (self.problem(own.name) for own in select(self.only)):
            against = {goal.against for goal in (*problem.forward, *problem.training)}
            for own in make_contenders(problem):
                wanted = own.group in ("linattn", *self.groups)
                if wanted and (not self.contenders or own.name.startswith(self.contenders)):
                    step = 0 if own.name in (OURS, IN_PLACE) else 1 if own.name in against else 2
                    for pass_name in problem.passes:
                        ordered.append((step, self.case(case=problem.name, contender=own.name, pass_name=pass_name)))
        found = [case for _, case in sorted(ordered, key=lambda item: item[0])]
        if self.cold and self.on_gpu:
            chosen = {problem.name for problem in select(self.only)}.intersection(COLD_CASES)
            found += [self.case(case=name, contender=OURS, pass_name=COLD, fresh=True) for name in sorted(chosen)]
        return found

    def fill(self, case: Case, work: Work, row: Row) -> None:
        """Call a contender once, check it, time it and weigh it."""
        problem, contender = self.named(case)
        row |= {"shape": problem.shape, "note": contender.note}
        if case["pass_name"] == COLD:
            row["first_seconds"] = cold_start(self, problem, contender)
            return
        device, dtype, training = self.place(), getattr(torch, self.dtype), case["pass_name"] == TRAINING
        if not _ceilings:
            work.tell(0.0, "measuring copy bandwidth and matmul rate")
            _ceilings.update(measure_ceilings(device, small=self.quick))
        key = "kernels", problem.name, str(case["settings"])
        tensors, grad, truth = shared(
            key, lambda: (*draw(problem, device, dtype, self.seed), Truth(problem, device, dtype, self.seed))
        )  # fmt: skip
        work.tell(0.2, "first call")
        bound = contender.bind(problem, tensors)
        call = bound.call(grad if training else None)
        seconds = first_call(call, device, contender.first_seconds)
        work.tell(0.4, "checking")
        verdicts = [truth.check(contender.bind, contender.softmax, training)] if contender.at_reduced_size else []
        if not contender.softmax:
            try:
                fresh = contender.bind(problem, tensors) if contender.name == IN_PLACE else bound
                verdicts.append(truth.check_full(fresh, tensors, grad, training))
                row["error_at_full_size"] = verdicts[-1].error
            except torch.OutOfMemoryError:
                if not verdicts:
                    raise
        note(row, next((own for own in verdicts if not own.ok), verdicts[0]))  # what is wrong is timed all the same
        work.tell(0.6, "timing")
        timing, called, by = time_call(call, device, self.milliseconds)
        row |= timing.row() | {"timed_by": by, "called_ms": 1000 * called.median, "first_seconds": seconds}
        row["floor_ms"] = floors(problem, tensors, *(_ceilings[name] for name in CEILINGS))[case["pass_name"]]
        row["over_floor"] = row["median_ms"] / row["floor_ms"]
        extra = extra_bytes(call, device)
        row |= {"extra_bytes": extra, "extra_over_qkvo": extra / qkvo_bytes(problem, tensors)} | _ceilings

    def warm(self, case: Case) -> None:
        """Call once everything that the race will call."""
        problem, contender = self.named(case)
        for size in [problem, problem.reduced()] if contender.at_reduced_size else [problem]:
            tensors, grad = draw(size, self.place(), getattr(torch, self.dtype), self.seed)
            call = contender.bind(size, tensors).call(grad if case["pass_name"] == TRAINING else None)
            if contender.compiles:
                first_call(call, self.place(), self.most_seconds)

    def named(self, case: Case) -> tuple[Problem, Contender]:
        problem = self.problem(case["case"])
        return problem, next(own for own in make_contenders(problem) if own.name == case["contender"])

    def described(self, outcomes: Sequence[Outcome], rows: Sequence[Row]) -> dict[str, Any]:
        """The ceilings, and how many goals are reached."""
        found: dict[str, Any] = {}
        for name in CEILINGS:
            values = [row[name] for row in rows if name in row]
            found |= {name: median(values)} if values else {}
        for row in rows:
            for name in CEILINGS:
                row.pop(name, None)
        return found

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        goals = [] if self.quick else [goal for goal in outcomes(rows) if goal["reached"] is not None]
        missed = [f"{g['case']} {g['what']} {g['goal']}: {g['value']:.2f}" for g in goals if not g["reached"]]
        said = [f"{len(goals) - len(missed)} of {len(goals)} measured goals are reached."] if goals else []
        return said + ([f"Not reached: {'; '.join(missed)}."] if missed else [])

    def bad(self, row: Row) -> bool:
        """Failures of rivals are results."""
        return super().bad(row) and row["contender"].startswith("linattn")

    def charts(self, rows: Sequence[Row], meta: Mapping[str, Any]) -> list[Chart]:
        """Time over the floor, a line a case; goals are bars, and what is wrong is hollow."""
        timed = [row for row in rows if row.get("over_floor") and row["status"] in ("ok", "WRONG")]
        cases = list(dict.fromkeys(row["case"] for row in timed))
        looks = styles(list(dict.fromkeys(row["contender"] for row in timed)))

        def draw_pass(axes: Any, pass_name: str) -> None:
            for y, case in enumerate(cases):
                problem = BY_NAME[case]
                for goal in problem.forward if pass_name == FORWARD else problem.training:
                    mark = goal_over_floor(rows, case, pass_name, goal)
                    axes.plot([mark] if mark else [], [y] if mark else [], marker="|", markersize=12, color="#000000")
            for row in (row for row in timed if row["pass_name"] == pass_name):
                look = looks[row["contender"]]
                face = look.color if row["status"] == "ok" else "none"
                axes.plot([row["over_floor"]], [cases.index(row["case"])], marker=look.marker, color=look.color,
                          markerfacecolor=face, linestyle="none", markersize=5)  # fmt: skip
            axes.axvline(1, color="#999999", linewidth=1)
            axes.set_xscale("log")
            axes.set_yticks(range(len(cases)), cases)
            axes.invert_yaxis()
            axes.set(title=pass_name, xlabel="time over floor")

        height = 1.2 + 0.2 * len(cases)
        panels = [
            Panel(lambda axes, own=name: draw_pass(axes, own), f"{name}, time over floor by case", height, left=1.6)  # type: ignore[misc]
            for name in (FORWARD, TRAINING)
        ]
        reading = "A line a case; vertical bars are goals, hollow marks were not right."
        return [
            Chart("kernels", setting(meta, "time over floor", str(meta["settings"]["dtype"])), reading, panels, looks)
        ]


_ceilings: dict[str, float] = {}
"""Of the device of this process, once they are measured."""


def cold_start(config: Kernels, problem: Problem, contender: Contender) -> float:
    """Seconds of the first forward and backward, in a process that is fresh and with empty caches.

    Importing PyTorch and waking the GPU are not counted.
    """
    with tempfile.TemporaryDirectory(prefix="linattn-cold-", ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        tensors, grad = draw(problem, config.place(), getattr(torch, config.dtype), config.seed)
        (grad.flatten()[:64, None] @ grad.flatten()[None, :64]).sum().item()
        return first_call(contender.bind(problem, tensors).call(grad), config.place(), 120)
