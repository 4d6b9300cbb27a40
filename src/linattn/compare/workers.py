"""Runs of a comparison in several processes: small models leave the cores of a CPU idle."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

import torch

from linattn.compare.cells import Cell, CellResult
from linattn.compare.runner import Runner
from linattn.compare.settings import CompareConfig
from linattn.support.machine import cores
from linattn.tasks.load import load_images
from linattn.train.log import read_log

SECONDS_BETWEEN_LOOKS = 0.5
_RUNNER: Runner | None = None  # of a worker


def run_in_workers(config: CompareConfig, cells: list[Cell], on_work: Callable[[str], None]) -> Iterator[CellResult]:
    """Train ``cells`` in ``config.jobs`` processes with one thread each; results come as they are done.

    Weights depend on the number of threads in their last digits: all runs have the same one.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy threads in the middle of their work
    pool = ProcessPoolExecutor(config.jobs, mp_context=context, initializer=_start, initargs=(config,))
    waiting = {pool.submit(_run, cell): cell for cell in cells}
    try:
        while waiting:
            done, _ = wait(waiting, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
            for future in done:
                del waiting[future]
                yield future.result()
            on_work(_under_way(config, list(waiting.values())))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()  # what they have finished is on disk; to wait for the rest would take minutes
        raise
    pool.shutdown()


def default_jobs(device: str) -> int:
    """One process per core on a CPU, four at most; one on a GPU, which a process fills."""
    if device.startswith("cuda"):
        return 1
    return min(cores(), 4)


def _under_way(config: CompareConfig, cells: list[Cell]) -> str:
    """What runs have written of themselves: those that have begun stand first."""
    words = []
    for cell in cells[: config.jobs]:
        log = cell.folder(config.output) / "log.jsonl"
        done = len(read_log(log)) if log.exists() else 0
        words.append(f"{cell.title}: {done} of {config.train.epochs} epochs")
    return "; ".join(words)


def _start(config: CompareConfig) -> None:
    global _RUNNER
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    data = load_images(config.data, image_size=config.image_size)
    _RUNNER = Runner(config, data, lambda *_: None, lambda *_: None)


def _end_with(parent: int) -> None:
    """A worker whose parent was killed would go on, beside the one that the user starts next."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _run(cell: Cell) -> CellResult:
    assert _RUNNER is not None
    return _RUNNER.run(cell)
