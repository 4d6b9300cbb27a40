"""Runs a benchmark in a separate process: a crash, or a GPU that no longer responds, costs one row."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from linattn.lab.bench.apart import rows_apart
from linattn.lab.bench.beforehand import note_beforehand
from linattn.lab.bench.children import Line, in_parallel
from linattn.lab.bench.kernels.warm import ALONE
from linattn.lab.bench.language.rows import LanguageResult, LanguageRow
from linattn.lab.bench.language.settings import LanguageConfig
from linattn.support.machine import cores

SILENT_SECONDS = 300.0
WARM_SHARE = 0.4  # largest share of the time
Measure = Callable[..., LanguageResult[Any]]
OnRow = Callable[[Any], None]
OnWork = Callable[[str], None]


def measure_in_child(line: Line, measure: Measure, config: LanguageConfig, result: LanguageResult[Any]) -> None:
    measure(
        config,
        result,
        on_row=lambda row: line.send("row", row),
        on_work=lambda what: line.send("work", what),
        on_begin=lambda row: line.send("begin", row),
    )


def run_apart(
    measure: Measure,
    config: LanguageConfig,
    result: LanguageResult[Any],
    *,
    on_row: OnRow,
    on_work: OnWork,
    target: Callable[..., None] = measure_in_child,
) -> LanguageResult[Any]:
    """Run ``measure(config, result, ...)`` in a child; after a crash another child goes on after the failed row."""

    def failed(row: LanguageRow) -> list[LanguageRow]:
        old = result.find(row.key)
        return [row] if old is None or old.run != result.run else []

    rows_apart(
        target,
        lambda left: (measure, replace(config, seconds=left), result),
        result,
        config.seconds,
        on_row=on_row,
        on_work=on_work,
        failed=failed,
        silent_seconds=SILENT_SECONDS,
    )
    return result


def warm(
    target: Callable[..., None], tasks: Sequence[Any], config: LanguageConfig, result: LanguageResult[Any],
    on_work: OnWork,
) -> None:  # fmt: skip
    """Run ``target(task, config)`` for all tasks in parallel, which leaves compiled code on disk for the benchmark."""
    processes = min(len(tasks), max(1, cores() - 2))
    if not tasks:
        return
    done, begin = list[dict[str, Any]](), time.perf_counter()
    on_work(f"compiling {len(tasks)} in {processes} processes")
    for task, _, spent, error in in_parallel(
        target, tasks, (config,), processes=processes, seconds=WARM_SHARE * config.seconds, environment=ALONE
    ):
        done.append({"task": str(task), "seconds": round(spent, 1), "error": error[:200]})
        on_work(f"compiled {len(done)} of {len(tasks)}, the last {task}")
    note_beforehand(result.meta["runs"][-1], len(tasks), done, begin)
