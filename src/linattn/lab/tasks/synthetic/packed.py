"""Windows that hold several instances end to end, whose nodes may have names of several tokens; without loops."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from linattn.lab.tasks.text.generated import GeneratedTask, Range
from linattn.lab.tasks.text.task import IGNORED, Sequences, once
from linattn.support.config import option
from linattn.support.options import OptionError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
SMALLEST = 3
MOST_ROUNDS = 1000  # of drawing more instances: far more than can be needed by chance
MOST_WORDS = 2**20
DENSE = 3  # words for each one needed: with fewer, draws would mostly repeat words


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
        super().check()
        typical = self.typical(False)
        if typical > self.length:
            raise OptionError("length", f"must hold a test instance of about {typical:.0f} tokens, got {self.length}")

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        rng, width = numpy_random(generator), self.length + 1
        rows, asked = np.empty((count, width), np.int64), np.zeros((count, width), np.bool_)
        done = 0
        for _ in range(MOST_ROUNDS):
            if done == count:
                return windows(rows, asked)
            each = self.length / self.typical(train) + 1  # plus one that is cut
            stream = self.instances(rng, int(1.08 * (count - done) * each) + 5, train)
            begins = _begins(stream, self.length)[: count - done]
            place = begins[:, None] + np.arange(width)
            here = slice(done, done + len(begins))
            rows[here], asked[here] = stream.tokens[place], stream.asked[place]
            if not train:
                bounds = np.append(stream.starts, len(stream.tokens))
                whole = bounds[np.searchsorted(bounds, begins + width, side="right") - 1]
                asked[here] &= place < whole[:, None]
            done += len(begins)
        raise OptionError("length", f"must hold an instance, got {self.length}")


def windows(rows: Ints, asked: Flags) -> Sequences:
    """Sequences of T tokens from ``rows (B, T + 1)``, the last only a target; ``asked``: which tokens are scored."""
    targets = np.where(asked[:, 1:], rows[:, 1:], IGNORED)
    return Sequences(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(targets))


def _begins(stream: Stream, length: int) -> Ints:
    """Where windows begin: at instances that fit into one, after the tokens of the window before."""
    ends = np.append(stream.starts[1:], len(stream.tokens))
    fits = stream.starts[ends - stream.starts <= length]
    found: list[int] = []
    free = 0
    while (number := int(np.searchsorted(fits, free))) < len(fits) and fits[number] + length < len(stream.tokens):
        found.append(int(fits[number]))
        free = found[-1] + length
    return np.array(found, np.int64)


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
    """Groups of these sizes."""
    base = np.cumsum(sizes) - sizes
    of = np.repeat(np.arange(len(sizes)), sizes)
    return Groups(sizes, base, of, np.arange(len(of)) - base[of])


def shuffled(rng: np.random.Generator, of: Ints) -> Ints:
    """Indices of all members, group after group in the order of ``of``, shuffled inside each group."""
    return np.argsort(of + rng.random(len(of)))


def below(rng: np.random.Generator, limits: Ints) -> Ints:
    """For each limit, a uniform whole number from ``0 .. limit - 1``."""
    return (rng.random(len(limits)) * limits).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class NamedTask(PackedTask):
    """A task on nodes with names that differ within an instance. Marks, of one token each, come after the letters."""

    letters: int | None = option(50, "Letters of names, which are random words.", least=1)
    word_length: Range = option((1, 2), "Names have first .. last tokens.", least=1)
    nodes: int = option(100, "N, the largest n.", least=SMALLEST)

    @property
    @abstractmethod
    def marks(self) -> int:
        """The number of marks."""

    def check(self) -> None:
        super().check()
        letters, (first, last) = self.words.letters, self.word_length
        total = sum(letters**length for length in range(first, last + 1))
        if not self.nodes <= total <= MOST_WORDS:
            raise OptionError("letters", f"must give {self.nodes} to {MOST_WORDS} words, and {letters} give {total}")

    @once
    def words(self) -> "Words":
        return Words(self.nodes if self.letters is None else self.letters, *self.word_length)

    @property
    def bos(self) -> int:
        """The first mark, which begins an instance."""
        return self.words.tokens

    @property
    def vocabulary(self) -> int:
        """Number of tokens: letters, then marks."""
        return self.bos + self.marks

    @once
    def _lexicon(self) -> tuple[Ints, Ints]:
        """Tokens and lengths of all words, then of the marks as words of one token."""
        marks = np.zeros((self.marks, self.words.longest), np.int64)
        marks[:, 0] = self.bos + np.arange(self.marks)
        lengths = np.concatenate([self.words.lengths, np.ones(self.marks, np.int64)])
        return np.concatenate([self.words.lexicon, marks]), lengths

    @once
    def _shares(self) -> Floats:
        """``P(n <= m)`` for ``m = 3 .. N``, where ``P(n) ~ 1 / (n + sqrt N)``: small n are frequent, large not rare."""
        chances = 1 / (np.arange(SMALLEST, self.nodes + 1) + self.nodes**0.5)
        return np.cumsum(chances) / chances.sum()

    def sizes(self, rng: np.random.Generator, number: int, train: bool) -> Ints:
        """Numbers of nodes ``(number,)``: drawn as in training, or without ``train`` all the largest."""
        if not train:
            return np.full(number, self.nodes)
        return SMALLEST + np.searchsorted(self._shares[:-1], rng.random(number), side="right")

    def mean_size(self, train: bool) -> float:
        chances = np.diff(self._shares, prepend=0.0)
        return float(chances @ np.arange(SMALLEST, self.nodes + 1)) if train else float(self.nodes)

    def written(self, slots: Ints, asked: Flags, first: Ints) -> Stream:
        """The stream of ``slots (S,)``, each a word or behind all words a mark; instances start at slots ``first``."""
        lexicon, lengths = self._lexicon
        sizes = lengths[slots]
        begin = np.cumsum(sizes) - sizes
        place = np.repeat(slots * lexicon.shape[1] - begin, sizes)
        place += np.arange(len(place))
        return Stream(lexicon.ravel()[place], np.repeat(asked, sizes), begin[first])


@dataclass(frozen=True)
class Words:
    """All words of ``shortest .. longest`` tokens over ``letters`` letters. All lengths are equally likely, and so are
    all words of a length.

    Letters are the tokens ``1 .. letters``; the last letter of a word is ``letters`` higher, which marks the end of the
    word. With ``longest = 1`` no mark is needed.
    """

    letters: int
    shortest: int
    longest: int

    @property
    def tokens(self) -> int:
        """Ids of letters are below this number; 0 is not a letter."""
        return 1 + self.letters * (2 if self.longest > 1 else 1)

    @property
    def kinds(self) -> Ints:
        """How many words there are of each length."""
        return np.asarray(self.letters ** np.arange(self.shortest, self.longest + 1))

    @cached_property
    def lengths(self) -> Ints:
        return np.repeat(np.arange(self.shortest, self.longest + 1), self.kinds)

    @cached_property
    def lexicon(self) -> Ints:
        """Tokens ``(W, longest)`` of all words, with zeros after the end of each."""
        found = np.zeros((len(self.lengths), self.longest), np.int64)
        for length in range(self.shortest, self.longest + 1):
            rows = np.nonzero(self.lengths == length)[0]
            for place in range(length):
                power = self.letters ** (length - 1 - place)
                found[rows, place] = 1 + np.arange(len(rows)) // power % self.letters
            if self.longest > 1:
                found[rows, length - 1] += self.letters
        return found

    def distinct(self, rng: np.random.Generator, sizes: Ints) -> Ints:
        """Draw ``sizes[m]`` different words for each instance, repeats being drawn again; their indices, end to end."""
        if len(self.lengths) <= DENSE * sizes.max(initial=1):
            return self._by_clocks(rng, sizes)
        return self._by_draws(rng, sizes)

    def _by_clocks(self, rng: np.random.Generator, sizes: Ints) -> Ints:
        """Draw by exponential clocks with the chances as rates: they ring in the order of draws without repetition."""
        chances = 1.0 / (self.letters**self.lengths * len(self.kinds))
        clocks = rng.standard_exponential((len(sizes), len(chances))) / chances
        order = np.argsort(clocks, axis=1)
        return order[np.arange(order.shape[1]) < sizes[:, None]]

    def _by_draws(self, rng: np.random.Generator, sizes: Ints) -> Ints:
        """Draw more words than needed, and keep the first different ones of each instance."""
        tried = groups(enough(self, int(sizes.max()))[sizes])
        drawn = self._draw(rng, len(tried.of))
        bits, inner_bits = (len(self.lengths) - 1).bit_length(), int(tried.sizes.max()).bit_length()
        # Sorted by instance, word and place: the first of equal words is the one drawn first.
        keys = np.sort((((tried.of << bits) | drawn) << inner_bits) | tried.inner)
        first = keys[np.diff(keys >> inner_bits, prepend=-1) != 0]
        new = np.zeros(len(drawn), np.bool_)
        new[tried.base[first >> (bits + inner_bits)] + (first & ((1 << inner_bits) - 1))] = True
        seen = np.cumsum(new)
        rank: Ints = seen - (seen - new)[tried.base][tried.of]  # counts the new words of the instance up to this one
        kept = new & (rank <= sizes[tried.of])
        wanted = groups(sizes)
        found = np.full(len(wanted.of), -1)
        found[wanted.base[tried.of[kept]] + rank[kept] - 1] = drawn[kept]
        for place in np.nonzero(found < 0)[0]:  # too few draws after all: rare
            own = slice(wanted.base[wanted.of[place]], place)
            while found[place] < 0 or found[place] in found[own]:
                found[place] = self._draw(rng, 1)[0]
        return found

    def _draw(self, rng: np.random.Generator, number: int) -> Ints:
        kinds = self.kinds
        which = rng.integers(0, len(kinds), number)
        return (np.cumsum(kinds) - kinds)[which] + (rng.random(number) * kinds[which]).astype(np.int64)


@cache
def enough(words: Words, largest: int) -> Ints:
    """``(largest + 1,)``: how many draws nearly always give n different words, for n = 0 .. largest."""
    kinds = words.kinds
    rates = 1 / (kinds * len(kinds))
    tries, wanted = np.arange(largest + 8), np.arange(largest + 1)
    while True:  # the expected number of different words after each number of draws
        expected = (kinds * -np.expm1(tries[:, None] * np.log1p(-rates))).sum(1)
        if expected[-1] >= largest + 4 * largest**0.5:
            return tries[np.searchsorted(expected, wanted + np.minimum(4 * wanted**0.5, wanted))]
        tries = np.arange(2 * len(tries))
