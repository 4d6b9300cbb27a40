"""Runs of a comparison in several processes: small models leave the cores of a CPU, or a GPU, idle."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

import torch

from linattn.compare.cells import Cell, CellResult
from linattn.compare.images import Images
from linattn.compare.settings import CompareConfig
from linattn.compare.subject import Comparing, Trainer
from linattn.compare.text.settings import TextCompareConfig
from linattn.compare.text.subject import Texts
from linattn.support.machine import cores
from linattn.tasks.load import load_images
from linattn.train.log import logged

SECONDS_BETWEEN_LOOKS = 0.5
_RUNNER: Trainer | None = None  # of a worker


def run_in_workers(config: Comparing, cells: list[Cell], on_work: Callable[[str], None]) -> Iterator[CellResult]:
    """Train ``cells`` in ``config.jobs`` processes with one thread each; results come as they are done.

    Weights depend on the number of threads in their last digits: all runs have the same one.
    """
    pools = _pools(config)
    # Compiled, a mechanism stays with one process: the code that was made for its first run serves the others.
    own = {name: i % len(pools) for i, name in enumerate(config.mechanisms)}
    waiting = {pools[own[cell.mechanism]].submit(_run, cell): cell for cell in cells}
    try:
        while waiting:
            done, _ = wait(waiting, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
            for future in done:
                del waiting[future]
                yield future.result()
            on_work(_under_way(config, list(waiting.values())))
    except BaseException:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()  # what they have finished is on disk; to wait for the rest would take minutes
        raise
    for pool in pools:
        pool.shutdown()


def _pools(config: Comparing) -> list[ProcessPoolExecutor]:
    """One pool of all processes, or, where code is compiled, a pool for each of them."""
    context = multiprocessing.get_context("spawn")  # a fork would copy threads in the middle of their work
    count, size = (min(config.jobs, len(config.mechanisms)), 1) if config.train.compile else (1, config.jobs)
    return [ProcessPoolExecutor(size, mp_context=context, initializer=_start, initargs=(config,)) for _ in range(count)]


def default_jobs(device: str) -> int:
    """One process per core on a CPU, four at most; one on a GPU, which large models fill."""
    if device.startswith("cuda"):
        return 1
    return min(cores(), 4)


def _under_way(config: Comparing, cells: list[Cell]) -> str:
    """What runs have written of themselves: those that have begun stand first."""
    words = []
    for cell in cells:
        done = logged(cell.folder(config.output) / "log.jsonl")
        words.append((-done, f"{cell.title}: {done} of {rounds_of(config)} evaluations"))
    return "; ".join(word for _, word in sorted(words, key=lambda found: found[0])[: config.jobs])


def rounds_of(config: Comparing) -> int:
    """Evaluations of a run: an epoch of images ends in one."""
    rounds: int = config.train.rounds if isinstance(config, TextCompareConfig) else config.train.epochs
    return rounds


def _start(config: Comparing) -> None:
    global _RUNNER
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    if config.train.compile:
        from torch._inductor import config as inductor

        inductor.compile_threads = max(1, cores() // config.jobs)  # it would start a process per core in each of them
    if isinstance(config, TextCompareConfig):
        _RUNNER = Texts(config).trainer(lambda *_: None, lambda *_: None)
    else:
        assert isinstance(config, CompareConfig)
        data = load_images(config.data, image_size=config.image_size)
        _RUNNER = Images(config, data).trainer(lambda *_: None, lambda *_: None)


def _end_with(parent: int) -> None:
    """A worker whose parent was killed would go on, beside the one that the user starts next."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _run(cell: Cell) -> CellResult:
    assert _RUNNER is not None
    return _RUNNER.run(cell)
