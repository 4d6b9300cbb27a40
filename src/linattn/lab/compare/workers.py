"""Trains the runs of a comparison in several processes, as small models leave a GPU, or cores of a CPU, idle."""

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

import torch

from linattn.lab.compare.cells import Cell, CellResult
from linattn.lab.compare.subject import Comparing, Subject, Trainer
from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.lab.compare.text.subject import Texts
from linattn.support.machine import cores
from linattn.support.processes import end_with_parent
from linattn.support.telling import OnWork

SECONDS_BETWEEN_LOOKS = 0.5
_RUNNER: Trainer | None = None  # set in worker processes


@contextmanager
def workers(config: Comparing) -> Iterator[Callable[[list[Cell], OnWork], Iterator[CellResult]]]:
    """Yield a function that trains cells in ``config.jobs`` processes with one thread each, yielding finished results.

    The processes stay from one list of cells to the next, as each has imported modules, opened the device and made its
    data. All runs have the same number of threads, as the last digits of weights depend on it.
    """
    pools = _pools(config) if config.jobs > 1 else []
    try:
        yield partial(_in_workers, config, pools)
    except BaseException:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()  # finished runs are on disk; waiting for others would take minutes
        raise
    for pool in pools:
        pool.shutdown()


def _in_workers(
    config: Comparing, pools: list[ProcessPoolExecutor], cells: list[Cell], on_work: OnWork
) -> Iterator[CellResult]:
    """Train cells in workers; conversions wait for the softmax models they start from, which workers train too."""
    yield from _train(config, pools, cells, on_work)


def _train(
    config: Comparing, pools: list[ProcessPoolExecutor], cells: list[Cell], on_work: OnWork
) -> Iterator[CellResult]:
    places = places_of(config, cells, len(pools))
    waiting = {pools[place].submit(_run, cell): cell for cell, place in zip(cells, places, strict=True)}
    while waiting:
        done, _ = wait(waiting, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
        for future in done:
            del waiting[future]
            yield future.result()
        on_work(_under_way(config, list(waiting.values())))


def places_of(config: Comparing, cells: list[Cell], pools: int) -> list[int]:
    """The pool of each run. A mechanism keeps its pool, so that code compiled for its first run serves all others.

    If there are more pools than mechanisms, each mechanism has several, and its runs take them in turns. Softmax models
    to be converted take all pools in turns.
    """
    names = list(config.mechanisms)
    share = max(1, pools // len(names))
    taken: Counter[str] = Counter()
    places = []
    for cell in cells:
        known = cell.mechanism in names
        turn = taken[cell.mechanism]
        taken[cell.mechanism] += 1
        places.append((names.index(cell.mechanism) * share + turn % share if known else turn) % pools)
    return places


def _pools(config: Comparing) -> list[ProcessPoolExecutor]:
    """One pool of all processes or, if code is compiled, a pool for each process."""
    context = multiprocessing.get_context("spawn")  # a fork would copy threads that are at work
    count, size = (1, config.jobs)
    if config.train.compile:
        count, size = min(config.jobs, len(config.mechanisms) * config.seeds), 1
    return [ProcessPoolExecutor(size, mp_context=context, initializer=_start, initargs=(config,)) for _ in range(count)]


def default_jobs(device: str) -> int:
    """One process per core on a CPU, at most four; one on a GPU, which large models fill."""
    if device.startswith("cuda"):
        return 1
    return min(cores(), 4)


def _under_way(config: Comparing, cells: list[Cell]) -> str:
    """The progress of runs, from the logs they write; runs that have begun come first."""
    words = []
    for cell in cells:
        log = cell.folder(config.output) / "log.jsonl"
        done = len(log.read_text().splitlines()) if log.exists() else 0
        words.append((-done, f"{cell.title}: {done} of {rounds_of(config, cell)} evaluations"))
    return "; ".join(word for _, word in sorted(words, key=lambda found: found[0])[: config.jobs])


def rounds_of(config: Comparing, cell: Cell) -> int:
    """Number of evaluations of a run; on images each epoch ends in one."""
    rounds: int = config.train.rounds if isinstance(config, TextCompareConfig) else config.train.epochs
    return rounds


def _start(config: Comparing) -> None:
    global _RUNNER
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    end_with_parent()
    torch.set_num_threads(1)
    if config.train.compile:
        from torch._inductor import config as inductor

        inductor.compile_threads = max(1, cores() // config.jobs)  # else each worker would start a process per core
    assert isinstance(config, TextCompareConfig)
    subject: Subject = Texts(config)
    _RUNNER = subject.trainer(lambda *_: None, lambda *_: None)


def _run(cell: Cell) -> CellResult:
    assert _RUNNER is not None
    return _RUNNER.run(cell)
