"""The texts around a needle, as RULER (arXiv:2404.06654) has them: sentences that repeat, or ordinary text."""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from linattn.support.options import OptionError
from linattn.tasks.text.passkey import SENTENCES

NOISE, TEXT = "noise", "text"
HAYSTACKS = (NOISE, TEXT)
LONGEST = 400  # characters of a sentence: what has no end marks is cut, so that a needle finds a place near its depth

WORD = re.compile(rf"\S{{1,{LONGEST}}}\s*")
END = re.compile(r"[.!?…][\"'”’)\]]*\s+$|\n\s*\n")


@dataclass(frozen=True)
class Haystack:
    """Sentences that come in turn around a needle, from a drawn one on; each ends with white space.

    Attributes:
        repeats: a few sentences of nearly one size, again and again; else each comes once at most.
    """

    name: str
    sentences: Sequence[str]
    repeats: bool = False

    def turn(self, first: int, count: int) -> list[str]:
        """``count`` sentences from number ``first`` on; after the last one comes the first."""
        return [self.sentences[(first + i) % len(self.sentences)] for i in range(count)]

    def place(self, turn: Sequence[str], depth: float) -> int:
        """How many sentences come before a needle: a share of them, or of the characters where sizes differ.

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
    """The sentences of ``texts``, one text after the other; they must have ``longest`` tokens, so that none repeats."""
    tokens = 0
    for text in texts:
        if tokens >= longest:
            break  # as far as this is known, no more is encoded
        tokens += len(encode(text.strip()))
    if tokens < longest:
        raise OptionError(
            "needle_haystacks",
            f"{TEXT} needs texts to measure on of at least {longest:,} tokens, the longest of --needle-lengths, got "
            f"{tokens:,}; give more with --eval-text, allow more of them with --texts, or use {NOISE}",
        )
    return Haystack(TEXT, [sentence for text in texts for sentence in split_sentences(text)])


def split_sentences(text: str) -> list[str]:
    """Pieces that end behind an end mark and white space, at an empty line, or before they get too long.

    Together they are the text, with an empty line at its end.

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
