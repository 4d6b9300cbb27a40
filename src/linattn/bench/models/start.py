"""The race of models in processes of its own: compiled beforehand in parallel, and a crash costs one row."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from linattn.bench.apart import rows_apart
from linattn.bench.children import Line, in_parallel
from linattn.bench.kernels.warm import ALONE
from linattn.bench.models.cases import ALL_LINEAR, SOFTMAX, ModelCase, softmax_model
from linattn.bench.models.hosts import create_host, draw_batch
from linattn.bench.models.look import look_at
from linattn.bench.models.rows import ModelRow, ModelsResult
from linattn.bench.models.run import FIRST_SECONDS, OnRow, OnWork, new_row, plan_of, run_models
from linattn.bench.models.settings import ModelsConfig
from linattn.bench.models.steps import EAGER_GRAPH, REDUCED, code_of, compile_host, flash_only, make_step

WARM_SHARE = 0.4  # of the time at the most
Task = tuple[ModelCase, str, str]  # mechanism and mode


def race_in_child(line: Line, config: ModelsConfig, result: ModelsResult) -> None:
    begun: set[tuple[str, str]] = set()

    def on_begin(case: str, mechanism: str, mode: str) -> None:
        if len(begun) == 1 and (case, mechanism) not in begun:
            # The first model is gone and all is imported: what is there stays, and collecting need not go through it.
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
    target: Callable[..., None] = race_in_child,
) -> ModelsResult:
    """:func:`run_models` in a process of its own, after several have filled the caches of compiled code."""

    def before() -> None:
        if config.processes:
            warm(config, result, WARM_SHARE * config.seconds, on_work)

    def failed(key: tuple[str, str, str]) -> list[ModelRow]:
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


def warm(config: ModelsConfig, result: ModelsResult, seconds: float, on_work: OnWork) -> None:
    """One block of every model: the graphs that all of its blocks share, or the kernels."""
    tasks = warm_tasks(plan_of(config, result))
    done, begin = list[dict[str, Any]](), time.perf_counter()
    on_work(f"compiling {len(tasks)} models in {config.processes} processes")
    for (case, mechanism, _), spent, error in in_parallel(
        warm_one, tasks, (config,), processes=config.processes, seconds=seconds, environment=ALONE
    ):
        done.append({"case": case.name, "mechanism": mechanism, "seconds": round(spent, 1), "error": error[:200]})
        on_work(f"compiled {len(done)} of {len(tasks)} models, the last {case.name}: {mechanism}")
    spent = round(time.perf_counter() - begin, 1)
    result.meta["runs"][-1]["compiled_beforehand"] = {"of": len(tasks), "seconds": spent, "done": done}


def warm_tasks(plan: list[Task]) -> list[Task]:
    """Once for modes of the same code. Without torch.compile only kernels of linear attention are compiled.

    Of two backbones that differ in which stages are linear, the one where all are has the kernels of the other.
    """
    tasks: dict[tuple[str, str, str], Task] = {}
    for case, mechanism, mode in plan:
        code = code_of(mode)
        if code == REDUCED or (code, mechanism) == (EAGER_GRAPH, SOFTMAX):
            continue
        one_for_both = mechanism == SOFTMAX or code == EAGER_GRAPH
        key = (softmax_model(case.name) if one_for_both else case.name, mechanism, code)
        if key not in tasks or case.size.endswith(ALL_LINEAR):
            tasks[key] = (case, mechanism, code)
    return list(tasks.values())


def warm_one(task: Task, config: ModelsConfig) -> None:
    case, mechanism, mode = task
    device = config.torch_device
    torch.compiler.reset()
    host = create_host(case, mechanism, device, config.seed, depth=case.checked_depth or 1)
    inputs, targets = draw_batch(case, device, config.seed)
    with flash_only(case, mechanism, device):
        loss_of = compile_host(host, mode, config.backend)
        make_step(host, loss_of, inputs, targets, config.autocast)()
        if mode == EAGER_GRAPH:
            look_at(host, mechanism, inputs, targets, config.autocast)  # without gradients kernels may be others
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # others compile beside it and need memory too
