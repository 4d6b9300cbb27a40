"""The race of models: case by case, softmax first, each mechanism in every mode."""

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import torch

from linattn.lab.bench.children import check_alive
from linattn.lab.bench.models.cases import SOFTMAX, ModelCase, softmax_model
from linattn.lab.bench.models.rows import ModelRow, ModelsResult
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.subject import OnWork, Subject

OnRow = Callable[[ModelRow], None]
OnBegin = Callable[[str, str, str], None]


def run_models(
    config: ModelsConfig,
    result: ModelsResult,
    *,
    on_row: OnRow = lambda row: None,
    on_work: OnWork = lambda what: None,
    on_begin: OnBegin = lambda case, mechanism, mode: None,
) -> ModelsResult:
    """Fill ``result``, which has an open run. Ctrl-C keeps the rows that are done and sets ``interrupted``.

    Rows that are not in ``result.checked`` are checked on the way.
    """
    config.check()
    deadline = time.perf_counter() + config.seconds
    device = config.torch_device
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            planned: dict[tuple[ModelCase, str], list[str]] = {}
            for case, mechanism, mode in plan_of(config, result):
                planned.setdefault((case, mechanism), []).append(mode)
            for (case, mechanism), modes in planned.items():
                subject: Subject | None = None
                for mode in modes:
                    row = new_row(case, mechanism, mode, result.run)
                    twin = same_model(result, row)
                    if twin is not None:
                        row = replace(twin, case=case.name, shape=case.shape, same_as=twin.case, profile=None)
                    elif time.perf_counter() > deadline:
                        row.status, row.reason = "left out", f"the {config.seconds:g} seconds did not suffice"
                    else:
                        on_begin(*row.key)
                        row = as_checked(result, row)
                        subject = subject or Subject(config, case, mechanism, on_work)
                        subject.measure(row)
                    result.put(row)
                    on_row(row)
                    if row.status == "failed" and device.type == "cuda":
                        check_alive(device)
                subject = None
                clean(config)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def plan_of(config: ModelsConfig, result: ModelsResult) -> list[tuple[ModelCase, str, str]]:
    """What is to be measured; rows that failed or were left out are tried again in the next run."""
    wanted = [
        (case, mechanism, mode)
        for case in config.selected() for mechanism in config.mechanisms_of(case) for mode in config.modes
    ]  # fmt: skip
    return [(case, *rest) for case, *rest in wanted if not finished(result, case.name, *rest)]  # type: ignore[misc]


def finished(result: ModelsResult, case: str, mechanism: str, mode: str) -> bool:
    row = result.find(case, mechanism, mode)
    return row is not None and (row.status not in ("left out", "failed") or row.run == result.run)


def new_row(case: ModelCase, mechanism: str, mode: str, run: int) -> ModelRow:
    return ModelRow(case.name, mechanism, mode, shape=case.shape, unit=case.unit, run=run)


def as_checked(result: ModelsResult, row: ModelRow) -> ModelRow:
    """The row with the findings of an earlier :meth:`Subject.check`, of this run or another; else unchanged."""
    known = deepcopy(result.checked.get(row.key))  # a copy: the row itself may still be left out
    return row if known is None else replace(known, run=result.run, checked_run=known.run)


def same_model(result: ModelsResult, row: ModelRow) -> ModelRow | None:
    """The row of another case that has the same model with softmax and need not be measured again."""
    if row.mechanism != SOFTMAX:
        return None
    model = softmax_model(row.case)
    for other in result.rows:
        measured = not other.same_as and other.status not in ("left out", "failed")
        if measured and other.case != row.case and other.key[1:] == row.key[1:] and softmax_model(other.case) == model:
            return other
    return None


def clean(config: ModelsConfig) -> None:
    if config.compiles:  # otherwise there is nothing to reset, and loading the compiler takes seconds
        torch.compiler.reset()
    gc.collect()
    if config.torch_device.type == "cuda":
        torch.cuda.empty_cache()
