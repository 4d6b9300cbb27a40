"""Runs the race of models in a separate process, prepared by others in parallel; a crash costs one row."""

import gc
from collections.abc import Callable
from dataclasses import replace

from linattn.lab.bench.apart import rows_apart
from linattn.lab.bench.children import Line
from linattn.lab.bench.models.beforehand import prepare
from linattn.lab.bench.models.rows import Key, ModelRow, ModelsResult
from linattn.lab.bench.models.run import OnRow, new_row, run_models
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.subject import FIRST_SECONDS, OnWork

WARM_SHARE = 0.4  # largest share of the time


def race_in_child(line: Line, config: ModelsConfig, result: ModelsResult) -> None:
    begun: set[tuple[str, str]] = set()

    def on_begin(case: str, mechanism: str, mode: str) -> None:
        if len(begun) == 1 and (case, mechanism) not in begun:
            # The first model is gone and everything is imported: what exists now stays, and is no garbage to look for.
            gc.freeze()
        begun.add((case, mechanism))
        line.send("begin", (case, mechanism, mode))

    run_models(
        config,
        result,
        on_row=lambda row: line.send("row", row),
        on_work=lambda what: line.send("work", what),
        on_begin=on_begin,
    )


def run_apart(
    config: ModelsConfig,
    result: ModelsResult,
    *,
    on_row: OnRow,
    on_work: OnWork,
    on_checked: Callable[[], None] = lambda: None,
    target: Callable[..., None] = race_in_child,
) -> ModelsResult:
    """:func:`run_models` in a separate process, after several have compiled, and checked what is not compiled."""

    def before() -> None:
        if config.processes:
            prepare(config, result, WARM_SHARE * config.seconds, on_work, on_checked)

    def failed(key: Key) -> list[ModelRow]:
        old = result.find(*key)
        if old is not None and old.run == result.run:
            return []
        case = next(c for c in config.selected() if c.name == key[0])
        return [new_row(case, *key[1:], result.run)]

    rows_apart(
        target,
        lambda left: (replace(config, seconds=left), result),
        result,
        config.seconds,
        on_row=on_row,
        on_work=on_work,
        failed=failed,
        silent_seconds=FIRST_SECONDS + 60,
        before=before,
    )
    return result
