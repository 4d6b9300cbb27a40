"""What needs no quiet GPU, done by several processes before the race: compiling, and the checks of eager steps."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from linattn.bench.beforehand import note_beforehand
from linattn.bench.children import check_alive, in_parallel
from linattn.bench.kernels.warm import ALONE
from linattn.bench.models.cases import SOFTMAX, ModelCase, softmax_model
from linattn.bench.models.hosts import create_host, draw_batch
from linattn.bench.models.rows import ModelRow, ModelsResult
from linattn.bench.models.run import new_row, plan_of, same_model
from linattn.bench.models.settings import ModelsConfig
from linattn.bench.models.steps import EAGER_GRAPH, REDUCED, code_of, compile_host, flash_only, make_step
from linattn.bench.models.subject import OnWork, Subject

MOST_TRIES, WAIT_SECONDS = 4, 3.0  # of a check beside others that take the memory
SECONDS_BETWEEN_SAVES = 5.0
Task = tuple[ModelCase, str, str]  # mechanism and mode


def prepare(
    config: ModelsConfig,
    result: ModelsResult,
    seconds: float,
    on_work: OnWork,
    on_checked: Callable[[], None] = lambda: None,
) -> None:
    """Fill the caches of compiled code on disk, and ``result.checked`` with the rows of eager steps.

    One that is missing, for want of time or of memory beside others, or after any error, is left to the race.
    ``on_checked()`` saves them: it is called on the way, and at the end if there are any.
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
            if time.perf_counter() - saved > SECONDS_BETWEEN_SAVES:  # processes wait for it
                on_checked()
                saved = time.perf_counter()
        done.append({"case": case.name, "mechanism": mechanism, "seconds": round(spent, 1), "error": error[:200]})
        on_work(f"compiled or checked {len(done)} of {len(tasks)} models, the last {case.name}: {mechanism}")
    note_beforehand(result.meta["runs"][-1], len(tasks), done, begin)
    if result.checked:
        on_checked()


def prepare_tasks(plan: list[Task], result: ModelsResult) -> list[Task]:
    """What is compiled, once for modes of the same code; then eager steps, each model once, the longest first.

    Eager steps that an earlier run has checked are not among them.
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
    """The largest images first; of these the largest of every family, then the next: the catalog has them last.

    Families alternate because processes that compile the same kernels at the same time do it twice.
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
    """A row that is checked, of an eager step. Where others beside it take the memory, it waits for them."""
    device, tries = config.torch_device, 0
    while True:
        torch.cuda.empty_cache()  # what was before, here or in the last task, is not to keep memory from others
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
    """The kernels that it runs are compiled by that: the race finds them on disk."""
    row = new_row(*task, run=0)
    Subject(config, task[0], task[1], lambda what: None).check(row)
    row.took = {f"{part} beforehand": seconds for part, seconds in row.took.items()}
    return row


def warm_one(task: Task, config: ModelsConfig) -> None:
    """One block of the model: the graphs that all of its blocks share."""
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
