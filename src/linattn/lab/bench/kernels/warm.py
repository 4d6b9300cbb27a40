"""Compiles in separate processes: beforehand for the race, and with empty caches to time cold starts."""

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from linattn.lab.bench.beforehand import note_beforehand
from linattn.lab.bench.children import in_parallel
from linattn.lab.bench.kernels.bound import Absent, Contender, forward_call, training_call
from linattn.lab.bench.kernels.cases import COLD_CASES, OURS, Case
from linattn.lab.bench.kernels.check import grad_for
from linattn.lab.bench.kernels.clock import first_call, quick_tuning
from linattn.lab.bench.kernels.lane import OnWork
from linattn.lab.bench.kernels.problems import draw
from linattn.lab.bench.kernels.rows import ColdStart, KernelsResult
from linattn.lab.bench.kernels.run import contenders_of, plan_of
from linattn.lab.bench.kernels.settings import KernelsConfig

# Each compiling process would start one process per core; and tuning beside others gives wrong results.
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}
SECONDS_FILE = "seconds"


def warm_tasks(config: KernelsConfig, result: KernelsResult) -> list[tuple[str, str]]:
    """Cases and contenders with a long first call, the longest first; for fla one case for all of a width."""
    plan = [(case, c) for _, case, c in plan_of(config, result) if c.compiles]
    own: dict[tuple[object, ...], tuple[Case, Contender]] = {}
    for case, contender in plan:
        size = (case.K, case.V) if contender.group == "fla" else (case.name,)
        own.setdefault((contender.name, *size), (case, contender))
    tasks = sorted(own.values(), key=lambda task: -task[1].first_seconds)
    return [(case.name, contender.name) for case, contender in tasks]


def warm(
    config: KernelsConfig, tasks: list[tuple[str, str]], result: KernelsResult, seconds: float, on_work: OnWork
) -> None:
    """Fill the caches of Triton and inductor on disk; tasks that do not end in time are stopped."""
    done = list[dict[str, Any]]()
    begin = time.perf_counter()
    on_work(f"compiling {len(tasks)} in {config.processes} processes")
    for (case, name), _, spent, error in in_parallel(
        warm_one, tasks, (config,), processes=config.processes, seconds=seconds, environment=ALONE
    ):
        done.append({"case": case, "contender": name, "seconds": round(spent, 1), "error": error[:200]})
        on_work(f"compiled {len(done)} of {len(tasks)} in {config.processes} processes, the last {case}: {name}")
    note_beforehand(result.meta["runs"][-1], len(tasks), done, begin)


def warm_one(task: tuple[str, str], config: KernelsConfig) -> None:
    """Call once everything that the race will call."""
    case, contender = _find(config, task)
    device = config.torch_device
    sizes = [case, case.reduced()] if contender.at_reduced_size else [case]
    for size in sizes:
        tensors = draw(size, device, config.torch_dtype, config.seed)
        with quick_tuning(device):
            if size.backward:
                training_call(contender.bind(size, tensors), grad_for(size, tensors, config.seed))()
            forward_call(contender.bind(size, tensors))()
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def cold_starts(config: KernelsConfig) -> list[ColdStart]:
    """Time each cold start in its own process with its own caches; there are cores for all of them at once."""
    found = []
    names = [case.name for case in config.selected() if case.name in COLD_CASES]
    with tempfile.TemporaryDirectory(prefix="linattn-cold-", ignore_cleanup_errors=True) as folder:
        # A folder each, so that none finds what another one has compiled.
        tasks = [(name, f"{folder}/{name}") for name in names]
        for (name, own), _, _, error in in_parallel(cold_one, tasks, (config,), processes=len(tasks), seconds=120):
            seconds = None if error else float((Path(own) / SECONDS_FILE).read_text())
            found.append(ColdStart(name, seconds, error[:240]))
    return found


def cold_one(task: tuple[str, str], config: KernelsConfig) -> None:
    """Time from the call to the end of its work; importing PyTorch and waking the GPU are not counted."""
    name, folder = task
    os.environ["TRITON_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    case, contender = _find(config, (name, OURS))
    device = config.torch_device
    tensors = draw(case, device, config.torch_dtype, config.seed)
    grad = grad_for(case, tensors, config.seed)
    (grad.flatten()[:64, None] @ grad.flatten()[None, :64]).sum().item()
    call = training_call(contender.bind(case, tensors), grad)
    seconds = first_call(call, device, 100)
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / SECONDS_FILE).write_text(str(seconds))


def _find(config: KernelsConfig, task: tuple[str, str]) -> tuple[Case, Contender]:
    case = next(case for case in config.selected() if case.name == task[0])
    found = [c for c in contenders_of(replace(config, contenders=()), case) if c.name == task[1]]
    if not found:
        raise Absent(f"no contender {task[1]} in {task[0]}")
    return case, found[0]
