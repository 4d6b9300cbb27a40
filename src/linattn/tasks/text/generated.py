"""Tasks whose sequences are drawn, not read."""

from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import cpu_count

import torch

from linattn.tasks.text.batch import Sequences, join
from linattn.tasks.text.checks import at_least
from linattn.tasks.text.once import once
from linattn.tasks.text.order import shuffled_batch
from linattn.tasks.text.seeds import as_generator, stream
from linattn.tasks.text.task import SequenceTask

BLOCK = 256  # sequences drawn at once for sets that are kept: bounds memory, whatever the size of the set


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(SequenceTask):
    """A task that draws its sequences.

    Training sequences are new in every batch, or with ``train_examples`` come from a fixed set of that size, shuffled
    anew in each epoch. Test sequences are a fixed set. Both sets depend on ``data_seed``, never on the seed of a run.
    """

    train_examples: int | None = None
    test_examples: int = 1000
    data_seed: int = 0

    def __post_init__(self) -> None:
        at_least("test_examples", self.test_examples, 1)
        if self.train_examples is not None:
            at_least("train_examples", self.train_examples, 1)

    @abstractmethod
    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        """``count`` sequences; ``train`` for tasks that train on more than they test."""

    def batch(self, seed: int | torch.Generator, count: int, *, train: bool = False) -> Sequences:
        """``count`` sequences from a seed, or from the next draws of a generator; scored as in a test, or in training.

        The same seed gives the same sequences.
        """
        at_least("count", count, 1)
        return self.draw(as_generator(seed), count, train)

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        at_least("batch_size", batch_size, 1)
        if self.train_examples is None:
            return self.draw(stream("train", self.data_seed, seed, step), batch_size, True)
        return widened(self._train_set.take(shuffled_batch(self.train_examples, batch_size, seed, step)))

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        at_least("batch_size", batch_size, 1)
        for first in range(0, self.test_examples, batch_size):
            yield widened(self._test_set.take(slice(first, first + batch_size)))

    @once
    def _train_set(self) -> Sequences:
        assert self.train_examples is not None
        return self._kept("train set", self.train_examples, True)

    @once
    def _test_set(self) -> Sequences:
        return self._kept("test set", self.test_examples, False)

    def _kept(self, purpose: str, total: int, train: bool) -> Sequences:
        def block(first: int) -> Sequences:
            return narrowed(self.draw(stream(purpose, self.data_seed, first), min(BLOCK, total - first), train))

        # Most of the work is torch's own, which lets other threads run. Blocks do not know one another.
        with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
            return join(pool.map(block, range(0, total, BLOCK)))


def narrowed(batch: Sequences) -> Sequences:
    """Token ids in a small type that holds them and ``IGNORED``: a set that is kept takes a quarter of the space."""
    kind = torch.int16 if max(int(batch.inputs.max()), int(batch.targets.max())) < 2**15 else torch.int32
    return replace(batch, inputs=batch.inputs.to(kind), targets=batch.targets.to(kind))


def widened(batch: Sequences) -> Sequences:
    return replace(batch, inputs=batch.inputs.long(), targets=batch.targets.long())
