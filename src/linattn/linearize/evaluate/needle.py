"""One needle in a long text (RULER, arXiv:2404.06654), for any tokenizer: a number asked for at the end."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch

from linattn.linearize.evaluate.perplexity import token_losses
from linattn.linearize.evaluate.quiet import quiet
from linattn.tasks.text.passkey import ADJECTIVES, NOUNS, SENTENCES

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Needle:
    """Tokens of one text; the last ``answer`` of them are the number."""

    ids: list[int]
    answer: int
    depth: float


@dataclass(frozen=True)
class NeedleRow:
    """One length and depth.

    Attributes:
        found: share of the texts whose number is right to the last digit, decoded greedily.
        tokens_right: share of the number's tokens that are the likeliest, given those before.
        nats: of a token of the number: it moves long before ``found`` does.
        count: texts.
    """

    length: int
    depth: float
    found: float
    tokens_right: float
    nats: float
    count: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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

    def made(sentences: int) -> Needle:
        turn = [filler[(first + i) % len(filler)] for i in range(sentences)]
        place = round(depth * sentences)
        prompt, answer = needle_text("".join(turn[:place]), "".join(turn[place:]), key, number)
        start, whole = encode(prompt), encode(prompt + answer)
        # A tokenizer may join the end of the prompt with the answer: what they have in common is given.
        given = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
        return Needle(whole, len(whole) - given, depth)

    bare = len(made(0).ids)
    if bare > length:
        raise ValueError(f"length must be at least {bare}, the needle and the question, got {length}")
    many = 1
    while len(made(many).ids) <= length:
        many *= 2
    return made(many // 2 + bisect_right(range(many // 2, many), length, key=lambda n: len(made(n).ids)) - 1)


def needle(
    model: Any,
    encode: Encode,
    lengths: Sequence[int],
    *,
    depths: Sequence[float] = DEPTHS,
    count: int = 4,
    digits: int = 7,
    filler: Sequence[str] = SENTENCES,
    seed: int = 0,
    progress: Callable[[NeedleRow], None] | None = None,
) -> list[NeedleRow]:
    """Retrieval by length and depth, ``count`` texts each; the same seed gives the same texts to every model.

    The number is read off one pass over the text with the number behind it: the likeliest tokens are all right there
    exactly if greedy decoding writes the number.
    """
    rows = []
    with quiet(model) as device:
        for length in lengths:
            for depth in depths:
                random = Random(f"{seed} {length} {depth}")
                texts = [make_needle(encode, length, depth, random, digits=digits, filler=filler) for _ in range(count)]
                rows.append(_row(model, texts, length, depth, device))
                if progress is not None:
                    progress(rows[-1])
    return rows


def _row(model: Any, texts: list[Needle], length: int, depth: float, device: torch.device) -> NeedleRow:
    found, right, nats, tokens = 0, 0, 0.0, 0
    for text in texts:
        ids = torch.tensor([text.ids], device=device)
        # The last token's logits predict nothing that is known.
        logits = model(ids, use_cache=False, logits_to_keep=text.answer + 1).logits[:, -text.answer - 1 : -1]
        targets = ids[:, -text.answer :]
        hits = logits.argmax(-1) == targets
        found += int(hits.all())
        right += int(hits.sum())
        nats += float(token_losses(logits, targets).sum())
        tokens += text.answer
    return NeedleRow(length, depth, found / len(texts), right / tokens, nats / tokens, len(texts))


def by_length(rows: Sequence[NeedleRow]) -> list[dict[str, Any]]:
    """Means over depths, weighted by texts.

    Example:
        >>> by_length([NeedleRow(64, 0.0, 1.0, 1.0, 0.0, 1), NeedleRow(64, 1.0, 0.0, 0.5, 2.0, 1)])
        [{'length': 64, 'found': 0.5, 'tokens_right': 0.75, 'nats': 1.0, 'count': 2}]
    """
    means = []
    for length in dict.fromkeys(row.length for row in rows):
        own = [row for row in rows if row.length == length]
        count = sum(row.count for row in own)
        mean = {
            name: sum(getattr(row, name) * row.count for row in own) / count
            for name in ("found", "tokens_right", "nats")
        }
        means.append({"length": length, **mean, "count": count})
    return means
