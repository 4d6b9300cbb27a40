"""Tasks whose sequences are drawn at random, not read: their sets, and draws for many sequences at once."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from os import cpu_count
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from linattn.lab.tasks.text.task import Sequences, SequenceTask, join, once, shuffled_batch
from linattn.support.config import digest, option
from linattn.support.files import write_atomically
from linattn.support.options import OptionError
from linattn.support.progress import OnWork, in_silence
from linattn.support.seeds import as_generator, stream

BLOCK = 256  # sequences drawn at once, which bounds memory whatever the size of the set
PART = 16  # blocks in one file: the most that is lost if drawing is interrupted
Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(SequenceTask):
    """A task that draws its sequences.

    Training sequences are new in every batch or, with ``train_examples``, come from a fixed set of that size, shuffled
    anew in each epoch. ``test_examples`` test sequences are a fixed set too. Fixed sets depend on ``data_seed``, not on
    the seed of a run. A pair of numbers among the settings is a range ``(first, last)``, both ends included.
    """

    train_examples: int | None = option(None, "Size of a fixed training set; none: new ones in each step.", least=1)
    test_examples: int = option(1000, "Test sequences.", least=1)
    data_seed: int = option(0, "Seed of fixed sets.")
    cache: str | None = option(None, "Folder that keeps fixed sets for other runs of the same settings.", affects=False)

    def check(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                require(name, value[0] <= value[-1], "(first, last) with first <= last", value)

    @property
    def train_size(self) -> int | None:
        return self.train_examples

    @abstractmethod
    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        """Draw ``count`` sequences; ``train``: as for training, where tasks may score more targets than in a test."""

    def batch(self, seed: int | torch.Generator, count: int, *, train: bool = False) -> Sequences:
        """Draw ``count`` sequences from a seed or a generator, as for a test or, with ``train``, for training."""
        return self.draw(as_generator(seed), count, train)

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        if self.train_examples is None:
            return self.draw(stream("train", self.data_seed, seed, step), batch_size, True)
        return _widened(self._train_set.take(shuffled_batch(self.train_examples, batch_size, seed, step)))

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        for first in range(0, self.test_examples, batch_size):
            yield _widened(self._test_set.take(slice(first, first + batch_size)))

    def prepare(self, on_work: OnWork = in_silence, *, train: bool = True, test: bool = True) -> None:
        sets = vars(self)  # where ``once`` keeps its values
        if train and self.train_examples is not None and "_train_set" not in sets:
            sets["_train_set"] = self._set("train set", self.train_examples, on_work)
        if test and "_test_set" not in sets:
            sets["_test_set"] = self._set("test set", self.test_examples, on_work)

    @once
    def _train_set(self) -> Sequences:
        return self._set("train set", self.train_examples or 0)

    @once
    def _test_set(self) -> Sequences:
        return self._set("test set", self.test_examples)

    def _set(self, purpose: str, total: int, on_work: OnWork = in_silence) -> Sequences:
        """Draw a set of ``total`` sequences, at most BLOCK at a time, in threads, as small integer types.

        Blocks are independent. ``cache`` keeps sets for later calls. A set is found by the content of its first block,
        which is always drawn: another version of a task or of torch may draw another one.
        """

        def block(first: int) -> Sequences:
            count, generator = min(BLOCK, total - first), stream(purpose, self.data_seed, first)
            drawn = self.draw(generator, count, purpose == "train set")
            # A quarter of the space for a kept set: a type that holds ids and IGNORED.
            kind = torch.int16 if max(int(drawn.inputs.max()), int(drawn.targets.max())) < 2**15 else torch.int32
            return replace(drawn, inputs=drawn.inputs.to(kind), targets=drawn.targets.to(kind))

        folder = None
        if self.cache is not None:
            settings = {k: v for k, v in self.values(affecting=True).items() if not k.endswith("_examples")}
            content = b"".join(value.contiguous().numpy().tobytes() for value in block(0).tensors().values())
            name = Path(f"{self.name}-{digest(settings)}", purpose.replace(" ", "-"))
            folder = Path(self.cache).expanduser() / name / hashlib.blake2b(content, digest_size=12).hexdigest()
        parts: list[Sequences] = []
        with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
            for first in range(0, total, BLOCK * PART):
                last = min(first + BLOCK * PART, total)
                path = folder and folder / f"{first}-{last - first}.pt"
                if path and path.exists():
                    parts.append(_load(path))
                else:
                    blocks = []
                    for drawn in pool.map(block, range(first, last, BLOCK)):
                        blocks.append(drawn)
                        done = min(first + BLOCK * len(blocks), last)
                        on_work(f"drawing the {purpose} of {self.name}: {done:,} of {total:,} sequences")
                    parts.append(join(blocks))
                    if path:
                        write_atomically(path, partial(torch.save, parts[-1].tensors()))
        return join(parts)


def _widened(batch: Sequences) -> Sequences:
    return replace(batch, inputs=batch.inputs.long(), targets=batch.targets.long())


def _load(path: Path) -> Sequences:
    try:
        return Sequences(**torch.load(path, weights_only=True))
    except Exception as error:  # a truncated file fails in many ways
        raise OptionError("cache", f"{path} cannot be read ({error}): delete it") from error


def require(setting: str, holds: bool, allowed: str, value: object) -> None:
    """Raise an OptionError unless ``holds``; ``allowed`` states the condition in words."""
    if not holds:
        raise OptionError(setting, f"must be {allowed}, got {value!r}")


def distinct(generator: torch.Generator, count: int, weights: Tensor, number: int) -> Tensor:
    """Draw ``(count, number)`` indices into ``weights (N,)`` or ``(count, N)``, one after another, without repetition.

    Each draw takes index i with a chance proportional to ``weights[i]`` among those left. The order in which
    exponential clocks with these rates ring is such a draw: without a loop, and exact even if weights differ widely.
    """
    # log(1 - u), as u may be 0 and a clock must ring at a finite time; u = 0 itself would be 0 / 0 with a weight of 0.
    uniform = torch.rand(count, weights.shape[-1], generator=generator, dtype=torch.float64).clamp_(min=2.0**-60)
    clocks = -torch.log1p(-uniform) / weights
    return clocks.topk(number, largest=False, sorted=True).indices


def choose(generator: torch.Generator, count: int, total: int, number: int) -> Tensor:
    """Draw ``(count, number)`` indices below ``total``, all equally likely, without repetition, in random order."""
    return torch.rand(count, total, generator=generator).topk(number, largest=False, sorted=True).indices


def python_random(generator: torch.Generator) -> Random:
    """A generator of plain Python, seeded by the next draw, for sequences that are grown step by step."""
    return Random(int(torch.randint(2**62, (1,), generator=generator)))


def whole(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Whole numbers, uniform in ``low .. high``, both ends included."""
    return torch.randint(low, high + 1, shape, generator=generator)
