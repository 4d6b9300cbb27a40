"""Retrieval of one needle from a long text (RULER, arXiv:2404.06654): a number that is asked for at the end."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from linattn.convert.evaluate.haystack import NOISE
from linattn.convert.evaluate.needle_text import Needle
from linattn.convert.evaluate.perplexity import token_losses
from linattn.convert.evaluate.quiet import quiet


@dataclass(frozen=True)
class NeedleRow:
    """Retrieval at one haystack, length and depth.

    Attributes:
        found: share of the texts whose number is decoded (greedily) without a wrong digit.
        tokens_right: share of the number's tokens that are the most likely ones, given the tokens before them.
        nats: loss per token of the number; it changes long before ``found`` does.
        count: number of texts.
    """

    length: int
    depth: float
    found: float
    tokens_right: float
    nats: float
    count: int
    haystack: str = NOISE  # what files mean that name none

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def needles_found(model: Any, texts: Sequence[Needle], length: int, *, batch_tokens: int = 1) -> list[NeedleRow]:
    """Retrieval from texts of ``length`` tokens, with a row for each of their haystacks and depths.

    One pass over the text with the number appended is enough: greedy decoding writes the number exactly if each of its
    tokens is the most likely one there. ``batch_tokens``: tokens that the model sees at once, but at least one text.
    """
    size = max(1, batch_tokens // length)
    answers: list[list[tuple[bool, float]]] = []
    with quiet(model) as device:
        for first in range(0, len(texts), size):
            answers += _answers(model, texts[first : first + size], device)
    rows = []
    kinds = [(text.haystack, text.depth) for text in texts]
    for kind in dict.fromkeys(kinds):
        own = [answer for each, answer in zip(kinds, answers, strict=True) if each == kind]
        tokens = [token for answer in own for token in answer]
        found = sum(all(right for right, _ in answer) for answer in own) / len(own)
        right, nats = sum(right for right, _ in tokens), sum(nats for _, nats in tokens)
        haystack, depth = kind
        rows.append(NeedleRow(length, depth, found, right / len(tokens), nats / len(tokens), len(own), haystack))
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


def by_length(rows: Sequence[NeedleRow]) -> list[dict[str, Any]]:
    """Means over depths for each haystack and length, weighted by the number of texts.

    Example:
        >>> by_length([NeedleRow(64, 0.0, 1.0, 1.0, 0.0, 1), NeedleRow(64, 1.0, 0.0, 0.5, 2.0, 1)])
        [{'haystack': 'noise', 'length': 64, 'found': 0.5, 'tokens_right': 0.75, 'nats': 1.0, 'count': 2}]
    """
    means = []
    for haystack, length in dict.fromkeys((row.haystack, row.length) for row in rows):
        own = [row for row in rows if (row.haystack, row.length) == (haystack, length)]
        count = sum(row.count for row in own)
        mean = {
            name: sum(getattr(row, name) * row.count for row in own) / count
            for name in ("found", "tokens_right", "nats")
        }
        means.append({"haystack": haystack, "length": length, **mean, "count": count})
    return means
