"""Windows that hold several instances end to end, and arrays of groups of different sizes, without loops."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from linattn.lab.tasks.text.generated import GeneratedTask
from linattn.lab.tasks.text.task import IGNORED, Sequences
from linattn.support.options import OptionError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
SMALLEST = 3
MOST_ROUNDS = 1000  # of drawing more instances: far more than can be needed by chance


class Stream(NamedTuple):
    """Instances end to end: ``tokens (S,)``, whether each is a scored target (``asked``), and where instances start."""

    tokens: Ints
    asked: Flags
    starts: Ints


@dataclass(frozen=True, kw_only=True)
class PackedTask(GeneratedTask):
    """A task whose windows hold several instances.

    The first instance of a window is never cut. The last one may be, and the part cut off is thrown away; in a test an
    instance that was cut is not scored. An instance that is longer than a window does not begin one.
    """

    kind = "causal"

    @abstractmethod
    def instances(self, rng: np.random.Generator, number: int, train: bool) -> Stream:
        """Draw ``number`` instances, with the sizes of training, or without ``train`` of the largest size."""

    @abstractmethod
    def typical(self, train: bool) -> float:
        """Rough mean of the tokens of an instance; it decides how many are drawn at once, never what they contain."""

    def check(self) -> None:
        typical = self.typical(False)
        if typical > self.length:
            raise OptionError("length", f"must hold a test instance of about {typical:.0f} tokens, got {self.length}")

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        rows, asked = self.windows(numpy_random(generator), count, train)
        targets = np.where(asked[:, 1:], rows[:, 1:], IGNORED)
        return Sequences(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(targets))

    def windows(self, rng: np.random.Generator, count: int, train: bool) -> tuple[Ints, Flags]:
        """Tokens ``(count, length + 1)``, of which the last is only a target, and which of them are scored."""
        width = self.length + 1
        rows, asked = np.empty((count, width), np.int64), np.zeros((count, width), np.bool_)
        done = 0
        for _ in range(MOST_ROUNDS):
            if done == count:
                return rows, asked
            each = self.length / self.typical(train) + 1  # plus one that is cut
            stream = self.instances(rng, int(1.08 * (count - done) * each) + 5, train)
            begins = _begins(stream, self.length)[: count - done]
            place = begins[:, None] + np.arange(width)
            rows[done : done + len(begins)] = stream.tokens[place]
            flags = stream.asked[place]
            if not train:
                flags &= np.arange(width) < _whole(stream, begins, width)[:, None]
            asked[done : done + len(begins)] = flags
            done += len(begins)
        raise OptionError("length", f"must hold an instance, got {self.length}")


def _begins(stream: Stream, length: int) -> Ints:
    """Where windows begin: at instances that fit into one, after the tokens of the window before."""
    ends = np.append(stream.starts[1:], len(stream.tokens))
    fits = stream.starts[ends - stream.starts <= length]
    found: list[int] = []
    free = 0
    while True:
        number = int(np.searchsorted(fits, free))
        if number == len(fits) or fits[number] + length + 1 > len(stream.tokens):
            return np.array(found, np.int64)
        found.append(int(fits[number]))
        free = found[-1] + length


def _whole(stream: Stream, begins: Ints, width: int) -> Ints:
    """How many tokens of each window belong to whole instances."""
    bounds = np.append(stream.starts, len(stream.tokens))
    return bounds[np.searchsorted(bounds, begins + width, side="right") - 1] - begins


def numpy_random(generator: torch.Generator) -> np.random.Generator:
    """A numpy generator seeded by the next draw of ``generator``; for small arrays it is several times faster."""
    return np.random.Generator(np.random.SFC64(int(torch.randint(2**62, (1,), generator=generator))))


class Groups(NamedTuple):
    """``sizes (M,)``, and for each of ``sum(sizes)`` members its group ``of`` and its place ``inner`` in the group."""

    sizes: Ints
    base: Ints
    of: Ints
    inner: Ints


def groups(sizes: Ints) -> Groups:
    """Groups of these sizes.

    Example:
        >>> found = groups(np.array([2, 3]))
        >>> found.base.tolist(), found.of.tolist(), found.inner.tolist()
        ([0, 2], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2])
    """
    base = np.cumsum(sizes) - sizes
    of = np.repeat(np.arange(len(sizes)), sizes)
    return Groups(sizes, base, of, np.arange(len(of)) - base[of])


def shuffled(rng: np.random.Generator, of: Ints) -> Ints:
    """Indices of all members, group after group in the order of ``of``, shuffled inside each group.

    Example:
        >>> of = np.array([0, 0, 0, 1, 1])
        >>> of[shuffled(np.random.default_rng(0), of)].tolist()
        [0, 0, 0, 1, 1]
    """
    return np.argsort(of + rng.random(len(of)))


def below(rng: np.random.Generator, limits: Ints) -> Ints:
    """For each limit, a uniform whole number from ``0 .. limit - 1``."""
    return (rng.random(len(limits)) * limits).astype(np.int64)


def written(lexicon: Ints, lengths: Ints, slots: Ints) -> tuple[Ints, Ints]:
    """Tokens of the entries ``slots (S,)`` of a lexicon ``(W, longest)``, end to end, and the length of each entry.

    Entry w has the tokens ``lexicon[w, : lengths[w]]``.
    """
    sizes = lengths[slots]
    begin = np.cumsum(sizes) - sizes
    place = np.repeat(slots * lexicon.shape[1] - begin, sizes)
    place += np.arange(len(place))
    return lexicon.ravel()[place], sizes


@cache
def shares(largest: int) -> Floats:
    """``P(n <= m)`` for ``m = 3 .. N``, where ``P(n) ~ 1 / (n + sqrt N)``: small n are frequent, and large n not rare.

    Example:
        >>> [round(float(share), 3) for share in shares(5)]
        [0.39, 0.718, 1.0]
    """
    chances = 1 / (np.arange(SMALLEST, largest + 1) + largest**0.5)
    return np.cumsum(chances) / chances.sum()


def draw_sizes(rng: np.random.Generator, number: int, largest: int, train: bool) -> Ints:
    """Sizes ``(number,)``: drawn as in training, or without ``train`` all the largest."""
    if not train:
        return np.full(number, largest)
    return SMALLEST + np.searchsorted(shares(largest)[:-1], rng.random(number), side="right")


def mean_size(largest: int, train: bool) -> float:
    chances = np.diff(shares(largest), prepend=0.0)
    return float(chances @ np.arange(SMALLEST, largest + 1)) if train else float(largest)
