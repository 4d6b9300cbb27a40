"""Feeds the batches of a task to the training device."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from linattn.lab.tasks.text import IGNORED, Sequences, SequenceTask
from linattn.lab.train.text.config import TextConfig
from linattn.support.machine import cores
from linattn.support.options import OptionError

MOST_THREADS = 8  # threads that make batches while a GPU works; on a CPU they would take cores from the model
Item = TypeVar("Item")


class Part(NamedTuple):
    """Sequences that go through the model at once; ``rows``: indices of the targets that are scored (None: all)."""

    batch: Sequences
    rows: Tensor | None


class Step(NamedTuple):
    """This process's parts of a step; ``total``: scored targets in all parts of all processes."""

    parts: list[Part]
    total: int


class Feed:
    """The steps of process ``rank`` of ``processes``.

    Every process makes the whole batch and keeps its share. A step thus has the same sequences for any number of
    processes, and each process knows the total of scored targets. The host finds out which targets are scored, so that
    nothing waits for the device.
    """

    def __init__(
        self, task: SequenceTask, config: TextConfig, device: torch.device, *, rank: int = 0, processes: int = 1
    ) -> None:
        self.task, self.config, self.device = task, config, device
        self.rank, self.processes, self.pieces = rank, processes, processes * config.accumulation
        if config.batch_size % self.pieces:
            allowed = f"a multiple of the {processes} processes times accumulation = {config.accumulation}"
            raise OptionError("batch_size", f"must be {allowed}, got {config.batch_size}")
        self.on_gpu = device.type == "cuda"
        # Recorded steps need a graph for each shape, and the number of scored targets may differ between batches.
        self.rounded = self.on_gpu and config.graphs is not False and self.pieces == 1
        self.threads = min(MOST_THREADS, max(1, cores() - 1)) if self.on_gpu else 0

    def train(self, first: int = 0) -> Generator[Step, None, None]:
        """Steps ``first, first + 1, ...`` without end, the same as in a whole run."""
        with closing(ahead(self._make, first, self.threads)) as steps:
            for step in steps:
                yield Step([self._send(*part) for part in step.parts], step.total)

    def test(self, task: SequenceTask) -> Iterator[Sequences]:
        """Batches with all test sequences of ``task`` once; several processes share them."""
        size = self.config.eval_batch_size or max(1, self.config.batch_size // self.pieces)
        for number, batch in enumerate(task.test_batches(size)):
            if number % self.processes == self.rank:
                yield without_idle_mask(batch).to(self.device, non_blocking=True)

    def _make(self, step: int) -> Step:
        """Make a step on the host, for a GPU in pinned memory, which it can copy from by itself."""
        batch = self.task.train_batch(self.config.batch_size, self.config.seed, step)
        if batch.cu_seqlens is not None and self.pieces == 1:
            parts = [self._part(batch)]  # a single row of many pieces cannot be divided
        else:
            size = self.config.batch_size // self.pieces
            own = range(self.rank, self.pieces, self.processes)
            parts = [self._part(batch.take(slice(i * size, (i + 1) * size))) for i in own]
        return Step(parts, int((batch.targets != IGNORED).sum()))

    def _part(self, batch: Sequences) -> Part:
        batch = without_idle_mask(replace(batch, exact=None))  # true distributions are only for tests
        scored = (batch.targets != IGNORED).flatten()
        rows = None if scored.all() else scored.nonzero().squeeze(1)
        if self.rounded and rows is not None and batch.cu_seqlens is None:
            rows = rounded_up(rows, scored)
        if self.on_gpu:
            batch, rows = batch.pin_memory(), None if rows is None else rows.pin_memory()
        return Part(batch, rows)

    def _send(self, batch: Sequences, rows: Tensor | None) -> Part:
        rows = None if rows is None else rows.to(self.device, non_blocking=True)
        return Part(batch.to(self.device, non_blocking=True), rows)


def rounded_up(rows: Tensor, scored: Tensor) -> Tensor:
    """Pad ``rows`` with the index of a place that is not ``scored``, which adds nothing to any sum.

    The number of rows is rounded up to one of eight values for each power of two, so that batches with about the same
    number share it. ``rows`` are the scored places of ``scored (n,)`` bool; the result has at most ``n`` rows.
    """
    count = len(rows)
    step = 1 << max(0, (count - 1).bit_length() - 4)
    wanted = min(-(-count // step) * step, len(scored))
    idle = (~scored).to(torch.uint8).argmax()
    return torch.cat([rows, idle.expand(wanted - count)])


def without_idle_mask(batch: Sequences) -> Sequences:
    """Leave out a mask that masks nothing, as every form is faster without a mask."""
    if batch.key_mask is None or not bool(batch.key_mask.all()):
        return batch
    return replace(batch, key_mask=None)


def ahead(make: Callable[[int], Item], first: int, threads: int) -> Generator[Item, None, None]:
    """``make(first), make(first + 1), ...`` without end, in this order; with 0 threads, each is made when it is needed.

    For each thread, one item waits besides the one it is working on. An error in ``make`` is raised at the place of its
    item. The threads end when the iterator is closed.

    Example:
        >>> squares = ahead(lambda n: n * n, 3, threads=2)
        >>> next(squares), next(squares)
        (9, 16)
        >>> squares.close()
    """
    if not threads:
        yield from map(make, count(first))
        return
    yield make(first)  # first and alone, so that what all items share is made once, and not by each thread
    with ThreadPoolExecutor(threads, "batches") as pool:
        waiting = deque(pool.submit(make, first + 1 + i) for i in range(2 * threads))
        try:
            for number in count(first + 1 + len(waiting)):
                item = waiting.popleft().result()
                waiting.append(pool.submit(make, number))
                yield item
        finally:
            for future in waiting:
                future.cancel()
