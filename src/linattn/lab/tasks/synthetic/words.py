"""Names of several tokens that differ from one another within an instance."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from linattn.lab.tasks.synthetic.packed import Floats, Ints, groups
from linattn.lab.tasks.text.generated import check_range
from linattn.support.options import OptionError, check_integer

MOST_WORDS = 2**20
DENSE = 3  # words for each one needed: with fewer, draws would mostly repeat words


@dataclass(frozen=True)
class Words:
    """All words of ``shortest .. longest`` tokens over ``letters`` letters; word w is drawn with chance ``chances[w]``.

    All lengths are equally likely. Letters are the tokens ``1 .. letters``; the last letter of a word is ``letters``
    higher, which marks the end of the word. With ``longest = 1`` no mark is needed.
    """

    letters: int
    shortest: int
    longest: int

    def check(self, needed: int) -> None:
        check_integer("letters", self.letters, 1)
        check_range("word_length", (self.shortest, self.longest), 1)
        total = sum(self.letters**length for length in range(self.shortest, self.longest + 1))
        if not needed <= total <= MOST_WORDS:
            raise OptionError("letters", f"must give {needed} to {MOST_WORDS} words, and {self.letters} give {total}")

    @property
    def tokens(self) -> int:
        """Ids of letters are below this number; 0 is not a letter."""
        return 1 + self.letters * (2 if self.longest > 1 else 1)

    @cached_property
    def lengths(self) -> Ints:
        spans = np.arange(self.shortest, self.longest + 1)
        return np.repeat(spans, self.letters**spans)

    @cached_property
    def lexicon(self) -> Ints:
        """Tokens ``(W, longest)`` of all words, with zeros after the end of each."""
        found = np.zeros((len(self.lengths), self.longest), np.int64)
        for length in range(self.shortest, self.longest + 1):
            rows = np.nonzero(self.lengths == length)[0]
            numbers = np.arange(len(rows))
            for place in range(length):
                found[rows, place] = 1 + numbers // self.letters ** (length - 1 - place) % self.letters
            if self.longest > 1:
                found[rows, length - 1] += self.letters
        return found

    @cached_property
    def chances(self) -> Floats:
        return 1.0 / (self.letters**self.lengths * (self.longest - self.shortest + 1))

    def distinct(self, rng: np.random.Generator, sizes: Ints) -> Ints:
        """Draw ``sizes[m]`` different words for each instance, repeats being drawn again; their indices, end to end."""
        if len(self.chances) <= DENSE * sizes.max(initial=1):
            return self._by_clocks(rng, sizes)
        return self._by_draws(rng, sizes)

    def _by_clocks(self, rng: np.random.Generator, sizes: Ints) -> Ints:
        """Draw by exponential clocks with rates ``chances``: they ring in the order of draws without repetition."""
        clocks = rng.standard_exponential((len(sizes), len(self.chances))) / self.chances
        order = np.argsort(clocks, axis=1)
        return order[np.arange(order.shape[1]) < sizes[:, None]]

    def _by_draws(self, rng: np.random.Generator, sizes: Ints) -> Ints:
        """Draw more words than needed, and keep the first different ones of each instance."""
        tried = groups(enough(self, int(sizes.max()))[sizes])
        drawn = self._draw(rng, len(tried.of))
        bits, inner_bits = int(len(self.chances) - 1).bit_length(), int(tried.sizes.max()).bit_length()
        # Sorted by instance, word and place: the first of equal words is the one drawn first.
        keys = np.sort((((tried.of << bits) | drawn) << inner_bits) | tried.inner)
        pairs = keys >> inner_bits
        first = keys[np.diff(pairs, prepend=-1) != 0]
        new = np.zeros(len(drawn), np.bool_)
        new[tried.base[first >> (bits + inner_bits)] + (first & ((1 << inner_bits) - 1))] = True
        seen = np.cumsum(new)
        before: Ints = (seen - new)[tried.base]
        rank: Ints = seen - before[tried.of]  # counts the new words of the instance up to this one
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
        spans = self.letters ** np.arange(self.shortest, self.longest + 1)
        which = rng.integers(0, len(spans), number)
        return (np.cumsum(spans) - spans)[which] + (rng.random(number) * spans[which]).astype(np.int64)


@lru_cache(maxsize=64)
def enough(words: Words, largest: int) -> Ints:
    """``(largest + 1,)``: how many draws nearly always give n different words, for n = 0 .. largest."""
    spans = np.arange(words.shortest, words.longest + 1)
    kinds = words.letters**spans
    rates = 1 / (kinds * len(spans))
    tries, wanted = np.arange(largest + 8), np.arange(largest + 1)
    while True:  # the expected number of different words after each number of draws
        expected = (kinds * -np.expm1(tries[:, None] * np.log1p(-rates))).sum(1)
        if expected[-1] >= largest + 4 * largest**0.5:
            return tries[np.searchsorted(expected, wanted + np.minimum(4 * wanted**0.5, wanted))]
        tries = np.arange(2 * len(tries))
