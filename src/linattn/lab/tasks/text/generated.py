"""Tasks whose sequences are drawn at random, not read: their sets, and draws for many sequences at once."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import cpu_count
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from linattn.lab.tasks.text.task import Sequences, SequenceTask, join, once, shuffled_batch
from linattn.support.config import digest, option
from linattn.support.files import write_atomically
from linattn.support.options import OptionError, check_integer
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
    the seed of a run.
    """

    train_examples: int | None = option(None, "Size of a fixed training set; none: new ones in each step.", least=1)
    test_examples: int = option(1000, "Test sequences.", least=1)
    data_seed: int = option(0, "Seed of fixed sets.")
    cache: str | None = option(None, "Folder that keeps fixed sets for other runs of the same settings.", affects=False)

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
        check_integer("count", count, 1)
        return self.draw(as_generator(seed), count, train)

    def _train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        if self.train_examples is None:
            return self.draw(stream("train", self.data_seed, seed, step), batch_size, True)
        return widened(self._train_set.take(shuffled_batch(self.train_examples, batch_size, seed, step)))

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        check_integer("batch_size", batch_size, 1)
        for first in range(0, self.test_examples, batch_size):
            yield widened(self._test_set.take(slice(first, first + batch_size)))

    def prepare(self, on_work: OnWork = in_silence, *, train: bool = True, test: bool = True) -> None:
        sets = vars(self)  # where ``once`` keeps its values
        if train and self.train_examples is not None and "_train_set" not in sets:
            sets["_train_set"] = self._set("train set", self.train_examples, True, on_work)
        if test and "_test_set" not in sets:
            sets["_test_set"] = self._set("test set", self.test_examples, False, on_work)

    @once
    def _train_set(self) -> Sequences:
        assert self.train_examples is not None
        return self._set("train set", self.train_examples, True)

    @once
    def _test_set(self) -> Sequences:
        return self._set("test set", self.test_examples, False)

    def _set(self, purpose: str, total: int, train: bool, on_work: OnWork = in_silence) -> Sequences:
        kept = None
        if self.cache is not None:
            settings = {k: v for k, v in self.values(affecting=True).items() if not k.endswith("_examples")}
            kept = Path(self.cache).expanduser() / f"{self.name}-{digest(settings)}" / purpose.replace(" ", "-")
        return draw_set(
            lambda first, count: self.draw(stream(purpose, self.data_seed, first), count, train),
            total,
            lambda done: on_work(f"drawing the {purpose} of {self.name}: {done:,} of {total:,} sequences"),
            kept,
        )


def draw_set(
    draw: Callable[[int, int], Sequences], total: int, on_count: Callable[[int], None], folder: Path | None = None
) -> Sequences:
    """Draw ``total`` sequences by ``draw(first, count)``, at most BLOCK at a time, as small integer types.

    Blocks are independent and drawn in threads, as most of the work is done by torch, which lets other threads run.
    ``on_count`` is called with the number of sequences so far. ``folder`` keeps sets for later calls. A set is found by
    the content of its first block, which is always drawn: another version of a task or of torch may draw another one.
    """

    def block(first: int) -> Sequences:
        return narrowed(draw(first, min(BLOCK, total - first)))

    if folder is not None:
        content = b"".join(value.contiguous().numpy().tobytes() for value in block(0).tensors().values())
        folder = folder / hashlib.blake2b(content, digest_size=12).hexdigest()
    parts, size = [], BLOCK * PART
    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
        for first in range(0, total, size):
            count = min(size, total - first)
            path = None if folder is None else folder / f"{first}-{count}.pt"
            if path is not None and path.exists():
                parts.append(_load(path))
                on_count(first + count)
                continue
            blocks, done = [], first
            for drawn in pool.map(block, range(first, first + count, BLOCK)):
                blocks.append(drawn)
                done += len(drawn)
                on_count(done)
            parts.append(join(blocks))
            if path is not None:
                tensors = parts[-1].tensors()
                write_atomically(path, lambda temporary, tensors=tensors: torch.save(tensors, temporary))  # type: ignore[misc]
    return join(parts)


def narrowed(batch: Sequences) -> Sequences:
    """The batch with ids in a small type that holds them and ``IGNORED``: a quarter of the space for a kept set."""
    kind = torch.int16 if max(int(batch.inputs.max()), int(batch.targets.max())) < 2**15 else torch.int32
    return replace(batch, inputs=batch.inputs.to(kind), targets=batch.targets.to(kind))


def widened(batch: Sequences) -> Sequences:
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


def check_range(setting: str, value: Range, low: int) -> None:
    """Check a range ``(first, last)``, both ends included."""
    require(setting, low <= value[0] <= value[1], f"(first, last) with {low} <= first <= last", value)


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
