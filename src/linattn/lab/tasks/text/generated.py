"""Tasks whose sequences are drawn at random, not read."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from linattn.lab.tasks.text.batch import Sequences
from linattn.lab.tasks.text.checks import at_least
from linattn.lab.tasks.text.drawn import draw_set, widened
from linattn.lab.tasks.text.once import once
from linattn.lab.tasks.text.order import shuffled_batch
from linattn.lab.tasks.text.task import PLACES, SequenceTask
from linattn.support.seeds import as_generator, stream
from linattn.support.telling import OnWork, in_silence

OF_SETS = ("train_examples", "test_examples", *PLACES)  # settings that do not change what a sequence is


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(SequenceTask):
    """A task that draws its sequences.

    Training sequences are new in every batch or, with ``train_examples``, come from a fixed set of that size, shuffled
    anew in each epoch. ``test_examples`` test sequences are a fixed set too. Fixed sets depend on ``data_seed``, not on
    the seed of a run. ``cache`` is a folder that keeps them for resumed runs and for others with the same settings.
    """

    train_examples: int | None = None
    test_examples: int = 1000
    data_seed: int = 0
    cache: str | None = None

    def __post_init__(self) -> None:
        at_least("test_examples", self.test_examples, 1)
        if self.train_examples is not None:
            at_least("train_examples", self.train_examples, 1)

    @property
    def train_size(self) -> int | None:
        return self.train_examples

    @abstractmethod
    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        """Draw ``count`` sequences; ``train``: as for training, where tasks may score more targets than in a test."""

    def batch(self, seed: int | torch.Generator, count: int, *, train: bool = False) -> Sequences:
        """Draw ``count`` sequences from a seed or a generator, as for a test or, with ``train``, for training.

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

    def prepare(self, on_work: OnWork = in_silence, *, train: bool = True, test: bool = True) -> None:
        sets = vars(self)  # where ``once`` keeps its values
        if train and self.train_examples is not None and "_train_set" not in sets:
            sets["_train_set"] = self._kept("train set", self.train_examples, True, on_work)
        if test and "_test_set" not in sets:
            sets["_test_set"] = self._kept("test set", self.test_examples, False, on_work)

    @once
    def _train_set(self) -> Sequences:
        assert self.train_examples is not None
        return self._kept("train set", self.train_examples, True)

    @once
    def _test_set(self) -> Sequences:
        return self._kept("test set", self.test_examples, False)

    def _kept(self, purpose: str, total: int, train: bool, on_work: OnWork = in_silence) -> Sequences:
        return draw_set(
            lambda first, count: self.draw(stream(purpose, self.data_seed, first), count, train),
            total,
            lambda done: on_work(f"drawing the {purpose} of {self.name}: {done:,} of {total:,} sequences"),
            None if self.cache is None else self._folder(purpose),
        )

    def _folder(self, purpose: str) -> Path:
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in OF_SETS}
        digest = hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=12).hexdigest()
        return Path(self.cache or "").expanduser() / f"{self.name}-{digest}" / purpose.replace(" ", "-")
