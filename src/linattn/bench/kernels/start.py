"""A race in processes of its own: what compiles is compiled beforehand in parallel, what crashes is one row."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from linattn.bench.children import Line, supervise
from linattn.bench.kernels.lane import OnWork, new_row, passes_of
from linattn.bench.kernels.rows import KernelsResult
from linattn.bench.kernels.run import OnRow, contenders_of, note_ceilings, plan_of, run_kernels
from linattn.bench.kernels.settings import KernelsConfig
from linattn.bench.kernels.warm import cold_starts, warm, warm_tasks

WARM_SHARE = 0.45  # of the time at the most
MOST_CHILDREN = 20


def race_in_child(line: Line, config: KernelsConfig, result: KernelsResult) -> None:
    run_kernels(
        config,
        result,
        on_row=lambda row: line.send("row", row),
        on_work=lambda what: line.send("work", what),
        on_begin=lambda case, contender: line.send("begin", (case, contender)),
        on_ceilings=lambda ceilings: line.send("ceilings", ceilings),
    )


def run_apart(
    config: KernelsConfig,
    result: KernelsResult,
    *,
    on_row: OnRow,
    on_work: OnWork,
    target: Callable[..., None] = race_in_child,
) -> KernelsResult:
    """:func:`run_kernels` with cold starts, compilation and timing in processes of their own, one after the other."""
    begin = time.perf_counter()
    try:
        if config.cold and not any(start.seconds for start in result.cold):
            on_work("cold starts in fresh processes")
            result.cold = cold_starts(config)
        tasks = warm_tasks(config, result)
        if config.processes and tasks:
            warm(config, tasks, result, WARM_SHARE * config.seconds, on_work)
        _Race(config, result, begin + config.seconds, on_row, on_work).run(target)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


class _Race:
    def __init__(
        self, config: KernelsConfig, result: KernelsResult, deadline: float, on_row: OnRow, on_work: OnWork
    ) -> None:
        self.config, self.result, self.deadline, self.on_row, self.on_work = config, result, deadline, on_row, on_work
        self.under_way: tuple[str, str] | None = None
        self.children = 0

    def run(self, target: Callable[..., None]) -> None:
        # Longer than anything may take in silence: the longest first call, and a check in fp64.
        longest = max((c.first_seconds for _, _, c in plan_of(self.config, self.result)), default=0)
        supervise(target, self._arguments, self._heard, self._died, silent_seconds=longest + 60)

    def _arguments(self) -> tuple[Any, ...]:
        self.children += 1
        left = max(self.deadline - time.perf_counter(), 1e-3)
        return replace(self.config, seconds=left), self.result

    def _heard(self, kind: str, value: Any) -> None:
        if kind == "row":
            self.result.put(value)
            self.on_row(value)
        elif kind == "work":
            self.on_work(value)
        elif kind == "ceilings":
            note_ceilings(self.result, value)
        elif kind == "begin":
            self.under_way = value

    def _died(self, reason: str) -> bool:
        if self.under_way is None:
            raise RuntimeError(f"nothing was measured: {reason}")
        case_name, name = self.under_way
        case = next(c for c in self.config.selected() if c.name == case_name)
        contender = next(c for c in contenders_of(self.config, case) if c.name == name)
        for pass_name in passes_of(case):
            old = self.result.find(case_name, name, pass_name)
            if old is None or old.run != len(self.result.meta["runs"]) - 1:
                row = new_row(case, contender, pass_name)
                row.status, row.reason, row.run = "failed", reason, len(self.result.meta["runs"]) - 1
                self.result.put(row)
                self.on_row(row)
        return self.children < MOST_CHILDREN and time.perf_counter() < self.deadline
