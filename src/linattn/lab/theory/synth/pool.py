"""Trains all runs of a laboratory in one pool of processes; comparisons then find them finished in their folders.

A comparison starts separate processes for the runs that choose learning rates and for the final ones, and there is one
comparison for each kind of positions: with runs of seconds these starts would take longer than the training.
"""

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import torch

from linattn.lab.compare.cells import Cell, CellResult, best_lrs, final_cells, runs_to_train, sweep_cells
from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.lab.compare.text.subject import Texts
from linattn.lab.theory.synth.settings import SynthConfig
from linattn.support.processes import end_with_parent

SECONDS_BETWEEN_LOOKS = 0.5
_TEXTS: dict[str, Texts] = {}  # of a worker process


def train_in_pool(config: SynthConfig, on_work: Callable[[str], None]) -> set[str]:
    """Train what the comparisons of ``config.parts`` will need; returns the kinds of positions with failed runs.

    A contender's final runs begin as soon as the runs that choose its learning rate are done.
    """
    parts, failed = config.parts, set[str]()
    texts = {kind: Texts(part) for kind, part in parts.items()}
    pool = ProcessPoolExecutor(
        config.shared.jobs,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would copy threads in the middle of their work
        initializer=_start,
        initargs=(parts,),
    )
    waiting: dict[Future[CellResult], str] = {}
    swept: dict[tuple[str, str], list[CellResult]] = {}
    try:
        for kind, part in parts.items():
            first = sweep_cells(part) or final_cells(part, best_lrs(part, []))
            waiting |= {pool.submit(_run, kind, cell): kind for cell in first}
        total, done = len(waiting), 0
        if config.final:
            total = sum(runs_to_train(part, texts[kind].sweep_is_final) for kind, part in parts.items())
        while waiting:
            for future in wait(waiting, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED).done:
                kind, result, done = waiting.pop(future), future.result(), done + 1
                if result.status != "done":
                    failed.add(kind)
                if result.cell.validation and config.final:
                    own = swept.setdefault((kind, result.cell.mechanism), [])
                    own.append(result)
                    for cell in _final(parts[kind], own):
                        if texts[kind].adopt(cell):
                            continue
                        total += 1 if cell.seed == 0 and texts[kind].sweep_is_final else 0  # it was not counted
                        waiting[pool.submit(_run, kind, cell)] = kind
            on_work(f"{done} of {total} runs")
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()  # finished runs are on disk; waiting for the others would take minutes
        raise
    pool.shutdown()
    return failed


def _final(part: TextCompareConfig, swept: list[CellResult]) -> list[Cell]:
    """Final runs of a contender once all its learning rates have been tried; none if all of these have failed."""
    if len(swept) < len(set(part.lrs)) or all(result.score is None for result in swept):
        return []
    name = swept[0].cell.mechanism
    lrs = best_lrs(part, swept, Texts(part).metric.higher)
    return [cell for cell in final_cells(part, lrs) if cell.mechanism == name]


def _start(parts: dict[str, TextCompareConfig]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_parent()
    torch.set_num_threads(1)
    _TEXTS.update({kind: Texts(part) for kind, part in parts.items()})


def _run(kind: str, cell: Cell) -> CellResult:
    return _TEXTS[kind].trainer(lambda *_: None, lambda *_: None).run(cell)
