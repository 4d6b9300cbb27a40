"""The text around a needle, as in RULER (arXiv:2404.06654): repeated sentences, or ordinary text."""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from linattn.convert.evaluate.words import SENTENCES
from linattn.support.options import OptionError

NOISE, TEXT = "noise", "text"
HAYSTACKS = (NOISE, TEXT)
LONGEST = 400  # characters of a sentence; text without end marks is cut, so that needles find places near their depth

WORD = re.compile(rf"\S{{1,{LONGEST}}}\s*")
END = re.compile(r"[.!?…][\"'”’)\]]*\s+$|\n\s*\n")


@dataclass(frozen=True)
class Haystack:
    """Sentences that follow one another around a needle, starting at a random one; each ends with white space.

    Attributes:
        repeats: True for a few sentences of nearly equal length that repeat; False if each comes at most once.
    """

    name: str
    sentences: Sequence[str]
    repeats: bool = False

    def turn(self, first: int, count: int) -> list[str]:
        """``count`` sentences starting at number ``first``; after the last sentence comes the first one again."""
        return [self.sentences[(first + i) % len(self.sentences)] for i in range(count)]

    def place(self, turn: Sequence[str], depth: float) -> int:
        """How many sentences come before a needle at ``depth``, by number, or by characters where sizes differ.

        Example:
            >>> Haystack("text", ()).place(["A long sentence. ", "Two. ", "Three. ", "Four. "], 0.5)
            1
        """
        if self.repeats:
            return round(depth * len(turn))
        before = [0, *accumulate(map(len, turn))]
        wanted = depth * before[-1]
        after = bisect_left(before, wanted)
        return after - 1 if after and wanted - before[after - 1] < before[after] - wanted else after


REPEATED = Haystack(NOISE, SENTENCES, repeats=True)


def text_haystack(texts: Sequence[str], encode: Callable[[str], list[int]], longest: int) -> Haystack:
    """The sentences of all ``texts`` in order; they must have at least ``longest`` tokens, so that none repeats."""
    tokens = 0
    for text in texts:
        if tokens >= longest:
            break  # long enough: nothing more is encoded
        tokens += len(encode(text.strip()))
    if tokens < longest:
        raise OptionError(
            "needle_haystacks",
            f"{TEXT} needs texts to measure on of at least {longest:,} tokens, the longest of --needle-lengths, got "
            f"{tokens:,}; give more with --eval-text, allow more of them with --texts, or use {NOISE}",
        )
    return Haystack(TEXT, [sentence for text in texts for sentence in split_sentences(text)])


def split_sentences(text: str) -> list[str]:
    """Split a text after end marks with white space and at empty lines, and cut sentences that get too long.

    The pieces joined are the text, with an empty line at its end.

    Example:
        >>> split_sentences("So it is.  (Is it?) Yes")
        ['So it is.  ', '(Is it?) ', 'Yes\\n\\n']
    """
    found: list[str] = []
    sentence = ""
    for word in WORD.findall(f"{text.strip()}\n\n"):
        if sentence and len(sentence) + len(word) > LONGEST:
            found.append(sentence)
            sentence = ""
        sentence += word
        if END.search(word):
            found.append(sentence)
            sentence = ""
    return found
