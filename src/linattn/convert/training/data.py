"""Training batches from text files, and the held-out part that quality is measured on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from linattn.convert.adapters.families import find_adapter
from linattn.convert.training.loop import Batch, Batches, StageOptions
from linattn.support.documents import as_text, encode, read_documents
from linattn.support.options import OptionError
from linattn.support.seeds import stream

Source = str | PathLike[str]

LONGEST = 1024  # tokens of a training sequence by default
HELD_OUT_TOKENS = 4096  # tokens that quality is measured on after each stage
# Passages that are repeated at the end of a sequence. The first tokens of one only say where it comes from; the
# shortest has several times as many that can be recalled. The longest still leaves room for a few passages from
# different places at the end of a sequence of 1,024 tokens.
SHORTEST_PASSAGE, LONGEST_PASSAGE = 16, 64
# One token in four is repeated: three quarters remain as written, far before most of the repetitions.
REPEATED_PART = 4
LEAST_LENGTH = REPEATED_PART * SHORTEST_PASSAGE  # of a sequence, so that one passage fits at its end


@dataclass(frozen=True, eq=False)
class Data:
    """Batches of each stage, and the held-out batches that quality is measured on."""

    batches: Callable[[StageOptions], Batches]
    held_out: list[Batch]
    length: int | None

    @classmethod
    def of_text(
        cls, model: Any, source: Source | Sequence[Source], tokenizer: Any, stages: Sequence[StageOptions]
    ) -> "Data":
        text = read_text(source, tokenizer if tokenizer is not None else _own_tokenizer(model))
        given = stages[0].length if stages else None  # a later stage's own length does not count for the first
        length = suited_length(model, LONGEST) if given is None else given

        def batches(stage: StageOptions) -> "TokenBatches":
            return text.batches(stage.batch_size, stage.length or length, stage.seed, stage.recall_share)

        for stage in stages:  # too little text is reported before any work is done
            check_positions(model, "length", stage.length or length)
            batches(stage)
        windows = text.windows(length, max(1, HELD_OUT_TOKENS // length))
        return cls(batches, list(batched(windows, 4)), length)

    def sized(self, stage: Any) -> Any:
        """A stage's options with its length filled in, if it was None."""
        return stage if stage.length is not None else replace(stage, length=self.length)


def suited_length(model: Any, longest: int) -> int:
    """The number of tokens that the model was made for, at most ``longest``."""
    most = find_adapter(model).most_tokens(model)
    return min(getattr(model.config, "max_position_embeddings", longest) if most is None else most, longest)


def check_positions(model: Any, option: str, tokens: int) -> None:
    """Raise OptionError if texts have more tokens than the model has learned positions."""
    most = find_adapter(model).most_tokens(model)
    if most is not None and tokens > most:
        raise OptionError(option, f"must not exceed the {most:,} positions that the model has learned, got {tokens:,}")


def _own_tokenizer(model: Any) -> Any:
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not source:
        raise OptionError("tokenizer", "is needed to read text: the model does not say where it came from")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


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
        _check_enough("held-out", len(self.held_out), inner)
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
    :func:`ending_in_passages`); which ones, and how, depends on the seed and on their place in the epoch. The other
    windows are the same as with a share of 0.

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
        if self._inner < 1:
            raise OptionError("length", f"must leave room beside the {self.length - self._inner} marks of a window")
        _check_enough("training", len(self.text.train), self._inner)
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
        for number, row in enumerate(ids if self.recall_share > 0 else (), place * self.batch_size):
            draw, length = stream("recall", self.seed, epoch, number), int(lengths[number - place * self.batch_size])
            if torch.rand((), generator=draw) < self.recall_share:
                row[:length] = ending_in_passages(row[:length], draw)
        if self.text.around is None:
            return {"input_ids": ids}
        ids = _between(ids, self.text.around)
        ids[torch.arange(self.batch_size), lengths + 1] = self.text.around[1]
        mask = torch.arange(self.length) < (lengths + 2)[:, None]
        return {"input_ids": ids.masked_fill(~mask, self.text.pad), "attention_mask": mask.long()}

    def _lengths(self, step: int) -> Tensor:
        """Tokens of each row, ``(B,)``, without marks and padding."""
        inner = self._inner
        if self.text.around is None:
            return torch.full((self.batch_size,), inner)
        least = min(inner, 4)
        # Lengths are uniform on a log scale: most sentences are far shorter than the longest.
        share = torch.rand(self.batch_size, generator=stream("lengths", self.seed, step))
        lengths = (least * (inner / least) ** share).round().long().clamp(least, inner)
        lengths[0] = inner
        return lengths

    def fingerprint(self) -> dict[str, Any]:
        """What tells these batches from others."""
        digest = blake2b(self.text.train.numpy().tobytes(), digest_size=8).hexdigest()
        return {"text": digest, "batch_size": self.batch_size, "length": self.length, "seed": self.seed,
                "recall_share": self.recall_share}  # fmt: skip


def ending_in_passages(ids: Tensor, draw: torch.Generator) -> Tensor:
    """Replace the last quarter of a sequence ``(T,)`` by passages from random places before it.

    Ordinary text rarely needs a token from far back, so a converted layer hardly learns to keep sharp matches sharp.
    Repeated passages are self-supervision on any text: there is no template, question or mark, and nothing that
    resembles how retrieval is measured. A sequence shorter than ``LEAST_LENGTH`` is returned unchanged.

    Example:
        >>> ids = ending_in_passages(torch.arange(64), torch.Generator().manual_seed(0))
        >>> ids[:48].tolist() == list(range(48)), (ids[48:] - ids[48]).tolist() == list(range(16))
        (True, True)
    """
    if len(ids) < LEAST_LENGTH:
        return ids
    kept = len(ids) - len(ids) // REPEATED_PART
    parts, left = [ids[:kept]], len(ids) - kept
    while left > 0:
        size = int(torch.randint(SHORTEST_PASSAGE, LONGEST_PASSAGE + 1, (), generator=draw))
        if left - size < SHORTEST_PASSAGE:  # the rest of the tokens would be too short for a passage
            size = left if left <= LONGEST_PASSAGE else left - SHORTEST_PASSAGE
        first = int(torch.randint(kept - size + 1, (), generator=draw))
        parts.append(ids[first : first + size])
        left -= size
    return torch.cat(parts)


def read_text(source: Source | Sequence[Source], tokenizer: Any, *, held_out: float = 0.1) -> TokenText:
    """Read text files, folders of them or jsonl files (see ``linattn.support.documents``) with a model's tokenizer.

    Of several documents the last ones are held out, of a single one its end. Documents are separated by the mark that
    the tokenizer itself sets: its mark of the start if it begins texts with one, else its mark of the end. Windows of
    an encoder get marks of their own instead.

    Args:
        held_out: share of the tokens to hold out, at least.
    """
    sources = [source] if isinstance(source, str | PathLike) else source
    if not isinstance(sources, Sequence) or not sources:
        raise OptionError("text", f"must be a path or a list of paths, got {source!r}")
    try:
        documents = [document for each in sources for document in read_documents(str(each))]
    except OptionError as error:
        raise OptionError("text", error.message) from error
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    around = None if start is None or end is None else (start, end)
    marks = _marks(tokenizer) if around is None else ([], [])
    before, after = (torch.tensor(ids, dtype=torch.int32) for ids in marks)
    encoded = [torch.cat([before, encode(tokenizer, as_text(document)), after]) for document in documents]
    wanted = held_out * sum(len(ids) for ids in encoded)
    if len(encoded) == 1:
        cut = int(len(encoded[0]) - wanted)
        return TokenText(encoded[0][:cut], encoded[0][cut:], around, tokenizer.pad_token_id or 0)
    first, left = len(encoded), wanted
    while left > 0 and first > 1:
        first -= 1
        left -= len(encoded[first])
    return TokenText(torch.cat(encoded[:first]), torch.cat(encoded[first:]), around, tokenizer.pad_token_id or 0)


def _marks(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids before and after each document."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if start is not None and tokenizer("a")["input_ids"][:1] == [start]:
        return [start], []
    return [], [] if end is None else [end]


def batched(windows: Tensor, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Split windows ``(N, T)`` into batches of a model."""
    for rows in windows.split(batch_size):
        yield {"input_ids": rows}


def _between(ids: Tensor, around: tuple[int, int]) -> Tensor:
    start, end = (torch.full((len(ids), 1), mark, dtype=ids.dtype) for mark in around)
    return torch.cat([start, ids, end], 1)


def _check_enough(part: str, tokens: int, length: int) -> None:
    if tokens < length:
        raise OptionError(
            "length", f"must not exceed the {tokens} tokens of the {part} part, got {length}; give more text"
        )
