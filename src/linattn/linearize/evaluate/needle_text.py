"""Texts of a given number of tokens that hide a number, for any tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from linattn.tasks.text.passkey import ADJECTIVES, NOUNS, SENTENCES

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Needle:
    """Tokens of one text; the last ``answer`` of them are the number."""

    ids: list[int]
    answer: int
    depth: float


def encoder(tokenizer: Any) -> Encode:
    """Text to ids, without marks of a start or an end."""
    return lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def needle_text(before: str, after: str, key: str, number: str) -> tuple[str, str]:
    """The text up to the answer, and the answer."""
    needle = f"One of the special magic numbers for {key} is: {number}. "
    question = f"The special magic number for {key} mentioned in the provided text is:"
    return f"{before}{needle}{after}{question}", f" {number}"


def make_needle(
    encode: Encode, length: int, depth: float, random: Random, *, digits: int = 7, filler: Sequence[str] = SENTENCES
) -> Needle:
    """A text of at most ``length`` tokens, and less than one sentence of the filler under it.

    Args:
        depth: 0 puts the needle at the start, 1 right before the question.
        filler: sentences that come in turn, from a drawn one on; each ends with a space.
    """
    key = f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"
    number = "".join(random.choice("0123456789") for _ in range(digits))
    first = random.randrange(len(filler))

    def made(sentences: int) -> tuple[str, list[int]]:
        turn = [filler[(first + i) % len(filler)] for i in range(sentences)]
        place = round(depth * sentences)
        prompt, answer = needle_text("".join(turn[:place]), "".join(turn[place:]), key, number)
        return prompt, encode(prompt + answer)

    prompt, whole = made(most_sentences(lambda n: len(made(n)[1]), length, len(filler)))
    # A tokenizer may join the end of the prompt with the answer: what they have in common is given.
    start = encode(prompt)
    given = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
    return Needle(whole, len(whole) - given, depth)


def most_sentences(size: Callable[[int], int], length: int, some: int) -> int:
    """The most sentences whose text has no more than ``length`` tokens; ``size(n)``: tokens of a text with n of them.

    Long texts take long to encode: from the size of ``some`` sentences a number is guessed, which is nearly right.
    """
    size = cache(size)
    if size(0) > length:
        raise ValueError(f"length must be at least {size(0)}, the needle and the question, got {length}")
    each = max((size(some) - size(0)) / some, 0.1)
    many = int((length - size(0)) / each)
    many = max(0, many + int((length - size(many)) / each))
    while size(many) > length:
        many -= 1
    while size(many + 1) <= length:
        many += 1
    return many


def needle_texts(
    encode: Encode,
    length: int,
    *,
    depths: Sequence[float] = DEPTHS,
    count: int = 4,
    digits: int = 7,
    filler: Sequence[str] = SENTENCES,
    seed: int = 0,
) -> list[Needle]:
    """``count`` texts of each depth; the same seed gives the same ones."""
    texts = []
    for depth in depths:
        random = Random(f"{seed} {length} {depth}")
        texts += [make_needle(encode, length, depth, random, digits=digits, filler=filler) for _ in range(count)]
    return texts
