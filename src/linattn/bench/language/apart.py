"""A measure in a process of its own: a crash, or a GPU that answers no more, costs one row."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from linattn.bench.children import Line, in_parallel, supervise
from linattn.bench.kernels.warm import ALONE
from linattn.bench.language.rows import LanguageResult, LanguageRow
from linattn.bench.language.settings import LanguageConfig
from linattn.support.machine import cores

MOST_CHILDREN = 10
SILENT_SECONDS = 300.0
WARM_SHARE = 0.4  # of the time at the most
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
    """``measure(config, result, ...)`` in a child; after a crash another child goes on behind the row that was it."""
    deadline = time.perf_counter() + config.seconds
    under_way: list[LanguageRow] = []
    children: list[int] = []

    def arguments() -> tuple[Any, ...]:
        children.append(1)
        return measure, replace(config, seconds=max(deadline - time.perf_counter(), 1e-3)), result

    def heard(kind: str, value: Any) -> None:
        if kind == "row":
            result.put(value)
            on_row(value)
        elif kind == "work":
            on_work(value)
        elif kind == "begin":
            under_way.append(value)

    def died(reason: str) -> bool:
        if not under_way:
            raise RuntimeError(f"nothing was measured: {reason}")
        row = under_way[-1]
        old = result.find(row.key)
        if old is None or old.run != result.run:
            row.status, row.reason = "failed", reason
            result.put(row)
            on_row(row)
        return len(children) < MOST_CHILDREN and time.perf_counter() < deadline

    try:
        supervise(target, arguments, heard, died, silent_seconds=SILENT_SECONDS)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def warm(
    target: Callable[..., None], tasks: Sequence[Any], config: LanguageConfig, result: LanguageResult[Any],
    on_work: OnWork,
) -> None:  # fmt: skip
    """``target(task, config)`` for each, in parallel: what is compiled lies on disk for the one that measures."""
    processes = min(len(tasks), max(1, cores() - 2))
    if not tasks:
        return
    done, begin = list[dict[str, Any]](), time.perf_counter()
    on_work(f"compiling {len(tasks)} in {processes} processes")
    for task, spent, error in in_parallel(
        target, tasks, (config,), processes=processes, seconds=WARM_SHARE * config.seconds, environment=ALONE
    ):
        done.append({"task": str(task), "seconds": round(spent, 1), "error": error[:200]})
        on_work(f"compiled {len(done)} of {len(tasks)}, the last {task}")
    spent = round(time.perf_counter() - begin, 1)
    result.meta["runs"][-1]["compiled_beforehand"] = {"of": len(tasks), "seconds": spent, "done": done}
