"""Windows that hold several instances end to end, the first of them whole."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from linattn.lab.tasks.synthetic.ragged import Flags, Ints
from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.generated import GeneratedTask
from linattn.support.options import SettingError

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

    def check_length(self) -> None:
        typical = self.typical(False)
        if typical > self.length:
            raise SettingError("length", f"must hold a test instance of about {typical:.0f} tokens, got {self.length}")

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
        raise SettingError("length", f"must hold an instance, got {self.length}")


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
