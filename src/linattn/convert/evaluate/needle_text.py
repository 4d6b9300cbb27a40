"""Texts with a given number of tokens that hide a number, for any tokenizer."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any

from linattn.convert.evaluate.haystack import NOISE, REPEATED, Haystack
from linattn.convert.evaluate.words import ADJECTIVES, NOUNS

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
GUESSES = 6  # tries to guess a number of sentences; after these the interval is halved

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Needle:
    """Token ids of one text; the last ``answer`` of them are the number."""

    ids: list[int]
    answer: int
    depth: float
    haystack: str = NOISE


def encoder(tokenizer: Any) -> Encode:
    """A function from text to token ids, without marks at the start or the end."""
    return lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def needle_text(before: str, after: str, key: str, number: str) -> tuple[str, str]:
    """The text up to the answer, and the answer itself."""
    needle = f"One of the special magic numbers for {key} is: {number}. "
    question = f"The special magic number for {key} mentioned in the provided text is:"
    return f"{before}{needle}{after}{question}", f" {number}"


def least_length(encode: Encode, digits: int = 7) -> int:
    """Tokens of needle and question alone, with the longest of their words: shorter texts cannot hold a needle.

    Example:
        >>> least_length(lambda text: text.split())
        23
    """
    words = [max(words, key=lambda word: len(encode(word))) for words in (ADJECTIVES, NOUNS)]
    prompt, answer = needle_text("", "", "-".join(words), "0" * digits)
    return len(encode(prompt + answer))


def make_needle(
    encode: Encode, length: int, depth: float, random: Random, *, digits: int = 7, haystack: Haystack = REPEATED
) -> Needle:
    """A text of at most ``length`` tokens, shorter than that by less than one sentence of the haystack.

    Args:
        depth: 0 puts the needle at the start, 1 right before the question.
    """
    key = f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"
    number = "".join(random.choice("0123456789") for _ in range(digits))
    first = random.randrange(len(haystack.sentences))

    @cache
    def made(sentences: int) -> tuple[str, list[int]]:
        turn = haystack.turn(first, sentences)
        place = haystack.place(turn, depth)
        prompt, answer = needle_text("".join(turn[:place]), "".join(turn[place:]), key, number)
        return prompt, encode(prompt + answer)

    own = haystack.turn(first, min(len(haystack.sentences), length))
    most = length if haystack.repeats else len(own)
    prompt, whole = made(most_sentences(lambda n: len(made(n)[1]), length, list(map(len, own)), most))
    # A tokenizer may join the end of the prompt with the answer: the prompt is what both encodings share.
    start = encode(prompt)
    given = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
    return Needle(whole, len(whole) - given, depth, haystack.name)


def most_sentences(size: Callable[[int], int], length: int, letters: Sequence[int], most: int) -> int:
    """The largest number of sentences, up to ``most``, whose text has at most ``length`` tokens.

    Long texts take long to encode: the number is guessed from characters, which is nearly right whether or not the
    sentences have equal lengths.

    Args:
        size: function that counts the tokens of a text with so many sentences.
        letters: characters of each sentence; after the last sentence comes the first one again.
    """
    before = [0, *accumulate(letters)]
    turn = before[-1]  # characters of one turn through all sentences
    least = size(0)
    if least > length:
        raise ValueError(f"length must be at least {least}, the needle and the question, got {length}")

    def characters(sentences: int) -> int:
        return sentences // len(letters) * turn + before[sentences % len(letters)]

    # Search between a number that fits and one that does not; every sentence has at least one token.
    low, low_size = 0, least
    high, high_size = min(most, length - least) + 1, 0
    tries = 0
    while high - low > 1:
        if tries >= GUESSES:
            guess = (low + high) // 2
        else:
            rate = 1.0
            if high_size:
                rate = (high_size - low_size) / (characters(high) - characters(low))
            elif low:
                rate = max((low_size - least) / characters(low), 0.01)
            target = int(characters(low) + (length - low_size) / rate)
            guess = target // turn * len(letters) + bisect_right(before, target % turn) - 1
        guess = min(max(guess, low + 1), high - 1)
        tries, tokens = tries + 1, size(guess)
        if tokens <= length:
            low, low_size = guess, tokens
        else:
            high, high_size = guess, tokens
    return low


def needle_texts(
    encode: Encode,
    length: int,
    *,
    depths: Sequence[float] = DEPTHS,
    count: int = 4,
    digits: int = 7,
    haystack: Haystack = REPEATED,
    seed: int = 0,
) -> list[Needle]:
    """Make ``count`` texts for each depth; the same seed gives the same texts."""
    texts = []
    own = "" if haystack.name == NOISE else f" {haystack.name}"
    for depth in depths:
        random = Random(f"{seed} {length} {depth}{own}")
        texts += [make_needle(encode, length, depth, random, digits=digits, haystack=haystack) for _ in range(count)]
    return texts
