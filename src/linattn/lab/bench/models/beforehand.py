"""Prepares a race in several processes, as far as no quiet GPU is needed: compilation, and checks of eager steps."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from linattn.lab.bench.beforehand import note_beforehand
from linattn.lab.bench.children import check_alive, in_parallel
from linattn.lab.bench.kernels.warm import ALONE
from linattn.lab.bench.models.cases import SOFTMAX, ModelCase, softmax_model
from linattn.lab.bench.models.hosts import create_host, draw_batch
from linattn.lab.bench.models.rows import ModelRow, ModelsResult
from linattn.lab.bench.models.run import new_row, plan_of, same_model
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.steps import EAGER_GRAPH, REDUCED, code_of, compile_host, flash_only, make_step
from linattn.lab.bench.models.subject import OnWork, Subject

MOST_TRIES, WAIT_SECONDS = 4, 3.0  # of a check while other processes take the memory
SECONDS_BETWEEN_SAVES = 5.0
Task = tuple[ModelCase, str, str]  # case, mechanism, mode


def prepare(
    config: ModelsConfig,
    result: ModelsResult,
    seconds: float,
    on_work: OnWork,
    on_checked: Callable[[], None] = lambda: None,
) -> None:
    """Fill the caches of compiled code on disk, and ``result.checked`` with the rows of eager steps.

    Steps that are missing, for lack of time or memory or after an error, are left to the race. ``on_checked()`` saves
    the rows: it is called from time to time, and at the end if there are any.
    """
    tasks = prepare_tasks(plan_of(config, result), result)
    done, begin = list[dict[str, Any]](), time.perf_counter()
    saved = begin
    on_work(f"compiling and checking {len(tasks)} models in {config.processes} processes")
    for (case, mechanism, _), row, spent, error in in_parallel(
        prepare_one, tasks, (config,), processes=config.processes, seconds=seconds, environment=ALONE
    ):
        if row is not None:
            row.run = result.run
            result.checked[row.key] = row
            if time.perf_counter() - saved > SECONDS_BETWEEN_SAVES:  # not too often: processes wait for it
                on_checked()
                saved = time.perf_counter()
        done.append({"case": case.name, "mechanism": mechanism, "seconds": round(spent, 1), "error": error[:200]})
        on_work(f"compiled or checked {len(done)} of {len(tasks)} models, the last {case.name}: {mechanism}")
    note_beforehand(result.meta["runs"][-1], len(tasks), done, begin)
    if result.checked:
        on_checked()


def prepare_tasks(plan: list[Task], result: ModelsResult) -> list[Task]:
    """The tasks: what is compiled, once for modes with the same code; then eager steps, once per model.

    The longest come first. Eager steps that an earlier run has checked are left out.
    """
    compiled: dict[tuple[str, str, str], Task] = {}
    eager: dict[tuple[str, str], Task] = {}
    for case, mechanism, mode in plan:
        code = code_of(mode)
        model = softmax_model(case.name) if mechanism == SOFTMAX else case.name
        if code == EAGER_GRAPH:
            if same_model(result, new_row(case, mechanism, mode, result.run)) is None:
                eager.setdefault((model, mechanism), (case, mechanism, code))
        elif code != REDUCED:
            compiled.setdefault((model, mechanism, code), (case, mechanism, code))
    unknown = [task for task in eager.values() if (task[0].name, *task[1:]) not in result.checked]
    return [*compiled.values(), *longest_first(unknown)]


def longest_first(tasks: list[Task]) -> list[Task]:
    """Sort by size of images, the largest first, and within it alternate between families, the largest models first.

    Families alternate since processes that compile the same kernels at the same time would do it twice.
    """
    larger: Counter[tuple[object, ...]] = Counter()
    ranked: list[tuple[int, int, Task]] = []
    for task in reversed(tasks):
        case, mechanism, _ = task
        family = (case.size.partition("_")[0], mechanism, case.pixels)
        ranked.append((-(case.pixels or case.tokens), larger[family], task))
        larger[family] += 1
    return [task for *_, task in sorted(ranked, key=lambda item: item[:2])]


def prepare_one(task: Task, config: ModelsConfig) -> ModelRow | None:
    """Prepare a task; returns the checked row of an eager step. Waits while other processes take the memory."""
    device, tries = config.torch_device, 0
    while True:
        torch.cuda.empty_cache()  # what is left from before, or from the last task, must not keep memory from others
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                if task[2] == EAGER_GRAPH:
                    return check_one(task, config)
                warm_one(task, config)
                return None
        except torch.OutOfMemoryError:
            tries += 1
            if tries == MOST_TRIES or task[2] != EAGER_GRAPH:
                raise
        except Exception:
            if device.type == "cuda":
                check_alive(device)
            raise
        time.sleep(WAIT_SECONDS)


def check_one(task: Task, config: ModelsConfig) -> ModelRow:
    """Check an eager step, which also compiles the kernels that it runs: the race finds them on disk."""
    row = new_row(*task, run=0)
    Subject(config, task[0], task[1], lambda what: None).check(row)
    row.took = {f"{part} beforehand": seconds for part, seconds in row.took.items()}
    return row


def warm_one(task: Task, config: ModelsConfig) -> None:
    """Run one block of the model, whose graphs all of its blocks share."""
    case, mechanism, mode = task
    device = config.torch_device
    torch.compiler.reset()
    host = create_host(case, mechanism, device, config.seed, depth=case.checked_depth or 1)
    inputs, targets = draw_batch(case, device, config.seed)
    with flash_only(case, mechanism, device):
        loss_of = compile_host(host, mode, config.backend)
        make_step(host, loss_of, inputs, targets, config.autocast)()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
