"""Retrieval of one needle from a long text (RULER, arXiv:2404.06654): a number that is asked for at the end.

What hides it, the haystack, is five sentences that repeat (``noise``) or ordinary text (``text``).
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from linattn.convert.evaluate.measures import token_losses
from linattn.convert.training.loop import quiet
from linattn.support.options import OptionError

SENTENCES = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)
ADJECTIVES = ("amber", "brave", "calm", "dusty", "eager", "faint", "grand", "hollow", "ivory", "jolly", "keen", "lone")
NOUNS = ("anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jungle", "lantern")
NOISE, TEXT = "noise", "text"
HAYSTACKS = (NOISE, TEXT)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DIGITS = 5  # of the number
LONGEST = 400  # characters of a sentence; text without end marks is cut, so that needles find places near their depth
WORD = re.compile(rf"\S{{1,{LONGEST}}}\s*")
END = re.compile(r"[.!?…][\"'”’)\]]*\s+$|\n\s*\n")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Haystack:
    """Sentences that follow one another around a needle, starting at a random one; each ends with white space.

    Attributes:
        repeats: True for a few sentences of nearly equal length that repeat; False if each comes at most once.
    """

    name: str
    sentences: Sequence[str]
    repeats: bool = False

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


def text_haystack(texts: Sequence[str], encode: Encode, longest: int) -> Haystack:
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
    pieces: list[str] = []
    sentence = ""
    for word in WORD.findall(f"{text.strip()}\n\n"):
        if sentence and len(sentence) + len(word) > LONGEST:
            pieces.append(sentence)
            sentence = ""
        sentence += word
        if END.search(word):
            pieces.append(sentence)
            sentence = ""
    return pieces


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


def _prompt(before: str, after: str, key: str, number: str) -> str:
    return (
        f"{before}One of the special magic numbers for {key} is: {number}. {after}"
        f"The special magic number for {key} mentioned in the provided text is:"
    )


def least_length(encode: Encode) -> int:
    """Tokens of needle and question alone, with the longest of their words: shorter texts cannot hold a needle.

    Example:
        >>> least_length(lambda text: text.split())
        23
    """
    words = [max(words, key=lambda word: len(encode(word))) for words in (ADJECTIVES, NOUNS)]
    return len(encode(f"{_prompt('', '', '-'.join(words), '0' * DIGITS)} {'0' * DIGITS}"))


def make_needle(encode: Encode, length: int, depth: float, random: Random, haystack: Haystack = REPEATED) -> Needle:
    """A text of at most ``length`` tokens, shorter than that by less than one sentence of the haystack.

    Args:
        depth: 0 puts the needle at the start, 1 right before the question.
    """
    key = f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"
    number = "".join(random.choice("0123456789") for _ in range(DIGITS))
    first = random.randrange(len(haystack.sentences))

    @cache
    def made(sentences: int) -> tuple[str, list[int]]:
        # After the last sentence comes the first one again.
        turn = [haystack.sentences[(first + i) % len(haystack.sentences)] for i in range(sentences)]
        place = haystack.place(turn, depth)
        prompt = _prompt("".join(turn[:place]), "".join(turn[place:]), key, number)
        return prompt, encode(f"{prompt} {number}")

    least = len(made(0)[1])
    if least > length:
        raise ValueError(f"length must be at least {least}, the needle and the question, got {length}")
    most = length - least  # as every sentence has at least one token
    counts = range(1, 1 + (most if haystack.repeats else min(most, len(haystack.sentences))))
    prompt, whole = made(bisect_right(counts, length, key=lambda count: len(made(count)[1])))
    # A tokenizer may join the end of the prompt with the answer: the prompt is what both encodings share.
    start = encode(prompt)
    given = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
    return Needle(whole, len(whole) - given, depth, haystack.name)


def needle_texts(
    encode: Encode, length: int, *, depths: Sequence[float] = DEPTHS, count: int = 4,
    haystack: Haystack = REPEATED, seed: int = 0,
) -> list[Needle]:  # fmt: skip
    """Make ``count`` texts for each depth; the same seed gives the same texts."""
    texts = []
    for depth in depths:
        random = Random(f"{seed} {length} {depth}" + ("" if haystack.name == NOISE else f" {haystack.name}"))
        texts += [make_needle(encode, length, depth, random, haystack) for _ in range(count)]
    return texts


def needles_found(model: Any, texts: Sequence[Needle], length: int, *, batch_tokens: int = 1) -> list[dict[str, Any]]:
    """Retrieval from texts of ``length`` tokens, with a row for each of their haystacks and depths.

    ``found``: the share of the ``count`` texts whose number is decoded (greedily) without a wrong digit;
    ``tokens_right``: that of the number's tokens that are the most likely ones, given the tokens before them; ``nats``:
    loss per token of the number, which changes long before ``found`` does.

    One pass over the text with the number appended is enough: greedy decoding writes the number exactly if each of its
    tokens is the most likely one there. ``batch_tokens``: tokens that the model sees at once, but at least one text.
    """
    size = max(1, batch_tokens // length)
    answers: dict[tuple[str, float], list[list[tuple[bool, float]]]] = {}
    with quiet(model) as device:
        for first in range(0, len(texts), size):
            batch = texts[first : first + size]
            for text, answer in zip(batch, _answers(model, batch, device), strict=True):
                answers.setdefault((text.haystack, text.depth), []).append(answer)
    rows = []
    for (haystack, depth), numbers in answers.items():
        tokens = [token for number in numbers for token in number]
        right, nats = sum(right for right, _ in tokens), sum(nats for _, nats in tokens)
        found = sum(all(right for right, _ in number) for number in numbers) / len(numbers)
        rows.append({"length": length, "depth": depth, "found": found, "tokens_right": right / len(tokens),
                     "nats": nats / len(tokens), "count": len(numbers), "haystack": haystack})  # fmt: skip
    return rows


def _answers(model: Any, texts: Sequence[Needle], device: torch.device) -> list[list[tuple[bool, float]]]:
    """For each token of each text's number: whether it is the most likely one, and its loss in nats.

    Shorter texts are padded at the end, which a causal model cannot see from earlier tokens.
    """
    ids = pad_sequence([torch.tensor(text.ids) for text in texts], batch_first=True).to(device)
    last = [len(text.ids) for text in texts]
    most = max(text.answer for text in texts)
    keep = ids.shape[1] - min(last) + most + 1
    logits = model(ids, use_cache=False, logits_to_keep=keep).logits[:, -keep:]
    # The last tokens of every text, as many as the longest answer has; what shorter answers do not need is dropped.
    place = torch.tensor(last)[:, None] - torch.arange(most, 0, -1)
    place, rows = place.to(device), torch.arange(len(texts), device=device)[:, None]
    targets = ids[rows, place]
    logits = logits[rows, place - 1 - (ids.shape[1] - logits.shape[1])]
    hits, nats = torch.stack([(logits.argmax(-1) == targets).float(), token_losses(logits, targets)]).tolist()
    return [
        [(bool(hit), nat) for hit, nat in zip(hits[i][-text.answer :], nats[i][-text.answer :], strict=True)]
        for i, text in enumerate(texts)
    ]


def by_length(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over depths for each haystack and length, weighted by the number of texts.

    Example:
        >>> row = {"haystack": "noise", "length": 64, "found": 1.0, "tokens_right": 1.0, "nats": 0.0, "count": 1}
        >>> by_length([row, row | {"found": 0.0, "tokens_right": 0.5, "nats": 2.0}])
        [{'haystack': 'noise', 'length': 64, 'found': 0.5, 'tokens_right': 0.75, 'nats': 1.0, 'count': 2}]
    """
    means = []
    for haystack, length in dict.fromkeys((row["haystack"], row["length"]) for row in rows):
        alike = [row for row in rows if (row["haystack"], row["length"]) == (haystack, length)]
        count = sum(row["count"] for row in alike)
        mean = {
            name: sum(row[name] * row["count"] for row in alike) / count for name in ("found", "tokens_right", "nats")
        }
        means.append({"haystack": haystack, "length": length, **mean, "count": count})
    return means
