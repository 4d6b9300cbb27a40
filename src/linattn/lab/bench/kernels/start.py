"""Runs a race in separate processes: compilation happens beforehand and in parallel, and a crash costs one row."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from linattn.lab.bench.apart import rows_apart
from linattn.lab.bench.children import Line
from linattn.lab.bench.kernels.lane import OnWork, new_row, passes_of
from linattn.lab.bench.kernels.rows import KernelRow, KernelsResult
from linattn.lab.bench.kernels.run import OnRow, contenders_of, note_ceilings, plan_of, run_kernels
from linattn.lab.bench.kernels.settings import KernelsConfig
from linattn.lab.bench.kernels.warm import cold_starts, warm, warm_tasks

WARM_SHARE = 0.45  # largest share of the time
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
    """:func:`run_kernels`, with cold starts, compilation and timing in separate processes, one after the other."""

    def before() -> None:
        if config.cold and not any(start.seconds for start in result.cold):
            on_work("cold starts in fresh processes")
            result.cold = cold_starts(config)
        tasks = warm_tasks(config, result)
        if config.processes and tasks:
            warm(config, tasks, result, WARM_SHARE * config.seconds, on_work)

    def on_other(kind: str, value: Any) -> None:
        if kind == "ceilings":
            note_ceilings(result, value)

    # Longer than anything may be silent: the longest first call, and a check in fp64.
    longest = max((c.first_seconds for _, _, c in plan_of(config, result)), default=0)
    rows_apart(
        target,
        lambda left: (replace(config, seconds=left), result),
        result,
        config.seconds,
        on_row=on_row,
        on_work=on_work,
        failed=lambda begun: _failed_rows(config, result, *begun),
        silent_seconds=longest + 60,
        before=before,
        on_other=on_other,
        most_children=MOST_CHILDREN,
    )
    return result


def _failed_rows(config: KernelsConfig, result: KernelsResult, case_name: str, name: str) -> list[KernelRow]:
    """A failed row for each pass that has no row of this run."""
    case = next(c for c in config.selected() if c.name == case_name)
    contender = next(c for c in contenders_of(config, case) if c.name == name)
    now, rows = len(result.meta["runs"]) - 1, list[KernelRow]()
    for pass_name in passes_of(case):
        old = result.find(case_name, name, pass_name)
        if old is None or old.run != now:
            row = new_row(case, contender, pass_name)
            row.run = now
            rows.append(row)
    return rows
