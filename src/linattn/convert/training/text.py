"""Batches of tokens from text files, and the held-out part of the text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from linattn.convert.training.recall import LEAST_LENGTH, ending_in_passages
from linattn.support.checks import check_number
from linattn.support.documents import as_text, read_documents
from linattn.support.options import OptionError
from linattn.support.seeds import stream

Source = str | PathLike[str]
PIECE = 1 << 20  # characters that a tokenizer gets at once


@dataclass(frozen=True, eq=False)
class TokenText:
    """Token ids of the training and the held-out part, ``(n,)`` each; documents are joined with a mark between them.

    Attributes:
        around: ids that an encoder expects before and after each window, ``[CLS]`` and ``[SEP]``; None: none.
        pad: id that shorter windows are padded with.
    """

    train: Tensor
    held_out: Tensor
    around: tuple[int, int] | None = None
    pad: int = 0

    def batches(self, batch_size: int, length: int, seed: int = 0, recall_share: float = 0.0) -> "TokenBatches":
        return TokenBatches(self, batch_size, length, seed, recall_share)

    def windows(self, length: int, count: int | None = None) -> Tensor:
        """Full windows of the held-out part, in order: ``(N, length)``; at most ``count``, spread over the part."""
        inner = length - (2 if self.around else 0)
        check_enough("held-out", len(self.held_out), inner)
        found = self.held_out[: len(self.held_out) // inner * inner].view(-1, inner).long()
        if count is not None and count < len(found):
            found = found[torch.linspace(0, len(found) - 1, count).round().long()]
        return found if self.around is None else _between(found, self.around)


@dataclass(frozen=True, eq=False)
class TokenBatches:
    """The training windows of a step: ``input_ids (B, T)``, a function of the step and the seed.

    Each epoch goes through all windows once, in a new order, and cuts the text at new places. For an encoder, which
    reads sentences rather than windows, each row is cut to a random length and padded, and comes with
    ``attention_mask (B, T)``.

    A share of the windows, ``recall_share``, ends with passages repeated from their own earlier text (see
    ``linattn.convert.training.recall``); which ones, and how, depends on the seed and on their place in the epoch.
    The other windows are the same as with a share of 0.

    Example:
        >>> text = TokenText(torch.arange(100), torch.arange(10))
        >>> batches = text.batches(batch_size=2, length=8)
        >>> batches(5)["input_ids"].shape, bool((batches(5)["input_ids"] == batches(5)["input_ids"]).all())
        (torch.Size([2, 8]), True)
    """

    text: TokenText
    batch_size: int
    length: int
    seed: int = 0
    recall_share: float = 0.0

    def __post_init__(self) -> None:
        check_number("recall_share", self.recall_share, least=0, most=1)
        if self._inner < 1:
            raise OptionError("length", f"must leave room beside the {self.length - self._inner} marks of a window")
        check_enough("training", len(self.text.train), self._inner)
        if self.recall_share > 0 and self._inner < LEAST_LENGTH:
            raise OptionError("recall_share", f"needs sequences of at least {LEAST_LENGTH} tokens, got {self._inner}")

    @property
    def _inner(self) -> int:
        return self.length - (2 if self.text.around else 0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch; last windows that do not fill a batch are left to the next epoch."""
        return max(1, (len(self.text.train) // self._inner - 1) // self.batch_size)

    def __call__(self, step: int) -> dict[str, Tensor]:
        epoch, place = divmod(step, self.steps_per_epoch)
        draw = stream("windows", self.seed, epoch)
        tokens, inner = self.text.train, self._inner
        offset = int(torch.randint(min(inner, len(tokens) - inner + 1), (), generator=draw))
        count = (len(tokens) - offset) // inner
        order = torch.randperm(count, generator=draw)
        rows = order[torch.arange(place * self.batch_size, (place + 1) * self.batch_size) % count]
        ids = tokens[(offset + rows * inner)[:, None] + torch.arange(inner)].long()
        lengths = self._lengths(step)
        if self.recall_share > 0:
            self._repeat(ids, lengths, epoch, place * self.batch_size)
        return {"input_ids": ids} if self.text.around is None else self._sentences(ids, lengths)

    def _repeat(self, ids: Tensor, lengths: Tensor, epoch: int, first: int) -> None:
        """Let a share of the rows end in passages of their own text, in place.

        ``first`` is the number of the first row in its epoch. An encoder's sentences too short for a passage stay
        unchanged.
        """
        for number, (row, length) in enumerate(zip(ids, lengths.tolist(), strict=True), first):
            draw = stream("recall", self.seed, epoch, number)
            if torch.rand((), generator=draw) < self.recall_share:
                row[:length] = ending_in_passages(row[:length], draw)

    def _lengths(self, step: int) -> Tensor:
        """Tokens of each row, ``(B,)``, without marks and padding."""
        inner = self._inner
        if self.text.around is None:
            return torch.full((self.batch_size,), inner)
        least = min(inner, 4)
        draw = stream("lengths", self.seed, step)
        # Lengths are uniform on a log scale: most sentences are far shorter than the longest.
        share = torch.rand(self.batch_size, generator=draw)
        lengths = (least * (inner / least) ** share).round().long().clamp(least, inner)
        lengths[0] = inner
        return lengths

    def _sentences(self, ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        assert self.text.around is not None
        rows, inner = ids.shape
        places = torch.arange(inner + 2)
        ids = _between(ids, self.text.around)
        ids[torch.arange(rows), lengths + 1] = self.text.around[1]
        mask = places < (lengths + 2)[:, None]
        return {"input_ids": ids.masked_fill(~mask, self.text.pad), "attention_mask": mask.long()}

    def fingerprint(self) -> dict[str, Any]:
        """What tells these batches from others."""
        digest = blake2b(self.text.train.numpy().tobytes(), digest_size=8).hexdigest()
        found = {"text": digest, "batch_size": self.batch_size, "length": self.length, "seed": self.seed}
        return found | ({"recall_share": self.recall_share} if self.recall_share else {})  # 0: as in older runs


def read_text(source: Source | Sequence[Source], tokenizer: Any, *, held_out: float = 0.1) -> TokenText:
    """Read text files, folders of them or jsonl files (see ``linattn.support.documents``) with a model's tokenizer.

    Of several documents the last ones are held out, of a single one its end. Documents are separated by the mark that
    the tokenizer itself sets: its mark of the start if it begins texts with one, else its mark of the end.

    Args:
        held_out: share of the tokens to hold out, at least.
    """
    if not 0 < held_out < 1:
        raise OptionError("held_out", f"must be a share between 0 and 1, got {held_out!r}")
    documents = [document for each in _sources(source) for document in _read(each)]
    around = _around(tokenizer)
    encoded = [_marked(_encode(tokenizer, as_text(document)), tokenizer, around) for document in documents]
    wanted = held_out * sum(len(ids) for ids in encoded)
    if len(encoded) == 1:
        cut = int(len(encoded[0]) - wanted)
        parts = [encoded[0][:cut]], [encoded[0][cut:]]
    else:
        first, left = len(encoded), wanted
        while left > 0 and first > 1:
            first -= 1
            left -= len(encoded[first])
        parts = encoded[:first], encoded[first:]
    train, tested = (torch.cat(part) for part in parts)
    return TokenText(train, tested, around, tokenizer.pad_token_id or 0)


def batched(windows: Tensor, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Split windows ``(N, T)`` into batches of a model."""
    for rows in windows.split(batch_size):
        yield {"input_ids": rows}


def check_enough(part: str, tokens: int, length: int) -> None:
    if tokens < length:
        raise OptionError(
            "length", f"must not exceed the {tokens} tokens of the {part} part, got {length}; give more text"
        )


def _sources(source: object) -> list[Source]:
    if isinstance(source, str | PathLike):
        return [source]
    if not isinstance(source, Sequence) or not source or not all(isinstance(each, str | PathLike) for each in source):
        raise OptionError("text", f"must be a path or a list of paths, got {source!r}")
    return list(source)


def _read(source: Source) -> list[Tensor]:
    try:
        return read_documents(str(source))
    except OptionError as error:
        raise OptionError("text", error.message) from error


def _around(tokenizer: Any) -> tuple[int, int] | None:
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    return None if start is None or end is None else (start, end)


def _marked(ids: Tensor, tokenizer: Any, around: tuple[int, int] | None) -> Tensor:
    if around is not None:
        return ids  # windows get marks of their own
    start = tokenizer.bos_token_id
    if start is not None and tokenizer("a")["input_ids"][:1] == [start]:
        return torch.cat([torch.tensor([start], dtype=torch.int32), ids])
    if tokenizer.eos_token_id is not None:
        return torch.cat([ids, torch.tensor([tokenizer.eos_token_id], dtype=torch.int32)])
    return ids


def _encode(tokenizer: Any, text: str) -> Tensor:
    """Token ids int32 ``(n,)``; long texts are encoded in pieces that end at the end of a line or a word."""
    found: list[int] = []
    first = 0
    while first < len(text):
        last = min(first + PIECE, len(text))
        if last < len(text):
            cuts = (text.rfind(sign, first + 1, last) for sign in ("\n", " "))
            last = next((cut for cut in cuts if cut > 0), last)
        found += tokenizer(text[first:last], add_special_tokens=False, verbose=False)["input_ids"]
        first = last
    return torch.tensor(found, dtype=torch.int32)


def _between(ids: Tensor, around: tuple[int, int]) -> Tensor:
    start, end = (torch.full((len(ids), 1), mark, dtype=ids.dtype) for mark in around)
    return torch.cat([start, ids, end], 1)
