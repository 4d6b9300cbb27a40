"""Language modelling on any text, as bytes or ids of a tokenizer: the next token, or hidden ones; and a needle in a
long text (RULER, arXiv:2404.06654)."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from re import finditer
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from linattn.convert.evaluate.needles import ADJECTIVES, NOUNS, SENTENCES
from linattn.lab.tasks.text.generated import GeneratedTask, python_random, require
from linattn.lab.tasks.text.task import IGNORED, Kind, Sequences, SequenceTask, content_digest, join, once
from linattn.support.config import option
from linattn.support.documents import SOURCES, as_bytes, as_text, encode, read_documents
from linattn.support.extras import need
from linattn.support.files import write_atomically
from linattn.support.options import OptionError
from linattn.support.seeds import stream

PARTS = ("train", "valid", "test")
ENWIK8 = 100_000_000  # bytes; a file of exactly this size is cut in the usual way


class Bytes:
    """The encoder without a tokenizer: ids are bytes, below ``size``; ``end`` follows documents, ``mask`` hides."""

    size, end, mask = 256, 256, 257

    def encode(self, document: Tensor) -> Tensor:
        return document


class Pretrained:
    """A tokenizer in a folder, as saved by transformers; with a folder ``cache``, texts are encoded only once.

    Where it has no token for the end of documents or for hidden ones, their ids are ``size`` and ``size + 1``.
    """

    def __init__(self, folder: str, cache: str | None = None) -> None:
        self.folder, self.cache = Path(folder).expanduser(), cache
        if not self.folder.is_dir():
            raise OptionError("tokenizer", f"must be a folder with a tokenizer of transformers, got {folder}")
        need("reading a tokenizer", "transformers")

    @once
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    @once
    def _content(self) -> str:
        return content_digest([self.folder])  # all files: some tokenizers have a separate file of words

    @property
    def size(self) -> int:
        return len(self.tokenizer)

    @property
    def end(self) -> int:
        return self._special(self.size, "eos_token_id", "sep_token_id")

    @property
    def mask(self) -> int:
        return self._special(self.size + 1, "mask_token_id")

    def _special(self, otherwise: int, *names: str) -> int:
        found = (getattr(self.tokenizer, name, None) for name in names)
        return next((number for number in found if number is not None), otherwise)

    def encode(self, document: Tensor) -> Tensor:
        """Encode a document as int32 ``(n,)``; ids in the cache are mapped into memory."""
        if self.cache is None:
            return encode(self.tokenizer, as_text(document))
        digest = hashlib.blake2b(self._content.encode() + document.numpy().tobytes(), digest_size=12).hexdigest()
        path = Path(self.cache).expanduser() / f"{digest}.int32"
        if not path.exists():
            tokens = encode(self.tokenizer, as_text(document)).numpy().tobytes()
            write_atomically(path, lambda temporary: temporary.write_bytes(tokens))
        return torch.from_file(str(path), shared=False, size=path.stat().st_size // 4, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class Part:
    """``tokens (n,)`` of any integer type; ``starts`` of the documents, the first 0; ``num_bytes`` of the text."""

    tokens: Tensor
    starts: Tensor
    num_bytes: int

    def __len__(self) -> int:
        return len(self.tokens)

    def window(self, first: Tensor, length: int) -> Sequences:
        """Windows of ``length`` tokens from ``first (B,)`` on, with the next tokens as targets; 0 beyond the end."""
        places = first[:, None] + torch.arange(length + 1)
        found = self.tokens[places.clamp(max=len(self) - 1)].long()
        beyond = places >= len(self)
        return Sequences(found[:, :-1].masked_fill(beyond[:, :-1], 0), found[:, 1:].masked_fill(beyond[:, 1:], IGNORED))

    def packed(self, first: Tensor, length: int) -> Sequences:
        """Windows laid end to end in one row ``(1, B x length)``, cut where a document begins.

        ``cu_seqlens`` holds the cuts, and no target is a token of another document.
        """
        batch = self.window(first, length)
        places = first[:, None] + torch.arange(length)
        begins = torch.isin(places, self.starts)
        begins[:, 0] = True
        targets = batch.targets.masked_fill(torch.isin(places + 1, self.starts), IGNORED)
        cuts = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([begins.numel()])])
        return Sequences(batch.inputs.view(1, -1), targets.view(1, -1), cu_seqlens=cuts.to(torch.int32))


def load_corpus(
    source: str, encoder: Bytes | Pretrained, *, valid: float = 0.05, test: float = 0.05
) -> tuple[dict[str, Part], int]:
    """The parts of the text of ``source`` by name, and a number that ids are below.

    A share ``test`` of its bytes is at the end, ``valid`` before it, the rest is to train on. A file of 100,000,000
    bytes, such as enwik8, gives parts of 90, 5 and 5 million. If there are several documents, each ends with
    ``encoder.end``, and cuts move to the beginning of the next document if that leaves no part empty.
    """
    documents = read_documents(source)
    sizes, several = [len(document) for document in documents], len(documents) > 1
    cuts, parts = part_borders(sizes, valid, test), {}
    for name, first, last in zip(PARTS, cuts[:-1], cuts[1:], strict=True):
        cut = [
            document[max(first - begin, 0) : max(last - begin, 0)]
            for document, begin in zip(documents, accumulate(sizes, initial=0), strict=False)
        ]
        pieces = [encoder.encode(piece) for piece in cut if len(piece)]
        if several:
            end = torch.tensor([encoder.end], dtype=torch.int32)
            pieces = [torch.cat([tokens.int(), end]) for tokens in pieces]
        # A single piece is not copied: a file that is mapped into memory stays so.
        tokens = pieces[0] if len(pieces) == 1 else torch.cat([torch.zeros(0, dtype=torch.int32), *pieces])
        starts = torch.tensor([0, *accumulate(map(len, pieces))])[:-1]
        parts[name] = Part(tokens, starts, sum(map(len, cut)))
    return parts, max(encoder.size, encoder.end + 1 if several else 0)


def part_borders(sizes: list[int], valid: float, test: float) -> tuple[int, int, int, int]:
    """Where the parts of documents of ``sizes`` bytes begin, and where the last one ends."""
    total = sum(sizes)
    if sizes == [ENWIK8]:
        return 0, 90_000_000, 95_000_000, total
    wanted = round(total * (1 - valid - test)), round(total * (1 - test))
    borders = list(accumulate(sizes, initial=0))
    first, second = (min((border for border in borders if border >= cut), default=total) for cut in wanted)
    fine = first > 0 and (first < second or not valid) and (second < total or not test)
    return (0, first, second, total) if fine else (0, *wanted, total)


@dataclass(frozen=True, kw_only=True)
class Text(SequenceTask):
    """Prediction of the next byte or token of a text.

    Training takes windows at random places; tests take consecutive windows, which cover all of the text.
    """

    name = "text"
    kind: ClassVar[Kind] = "causal"
    metric = "bits_per_byte"
    higher_is_better = False
    data: str = option(help=SOURCES)
    length: int = option(1024, "Tokens of a window.", least=2)
    tokenizer: str | None = option(None, "Folder of a tokenizer of transformers.", default_text="bytes")
    cache: str | None = option(None, "Folder that keeps the token ids of texts for later runs.", affects=False)
    valid: float = option(0.05, "Share of the text, before the test part; enwik8 is cut as usual.", least=0, most=0.9)
    test: float = option(0.05, "Share of the text, at its end; enwik8 is cut as usual.", least=0, most=0.9)
    evaluate: Literal["test", "valid"] = option("test", "The part that tests use.")
    test_windows: int | None = option(None, "Test on so many windows, from the beginning.", least=1, default_text="all")
    packed: bool = option(False, "Lay windows end to end in one row, cut where a document begins.")

    def check(self) -> None:
        require("valid + test", self.valid + self.test <= 0.95, "at most 0.95", self.valid + self.test)
        for name in ("train", self.evaluate):
            tokens = len(self.parts[name])
            require("length", tokens > self.length, f"below the {tokens} tokens of the {name} part", self.length)

    @once
    def encoder(self) -> Bytes | Pretrained:
        return Bytes() if self.tokenizer is None else Pretrained(self.tokenizer, self.cache)

    @once
    def _corpus(self) -> tuple[dict[str, Part], int]:
        return load_corpus(self.data, self.encoder, valid=self.valid, test=self.test)

    @property
    def parts(self) -> dict[str, Part]:
        return self._corpus[0]

    @property
    def vocabulary(self) -> int:
        return self._corpus[1]

    @property
    def bytes_per_token(self) -> float | None:
        return self._tested.num_bytes / len(self._tested)

    @property
    def _tested(self) -> Part:
        return self.parts[self.evaluate]

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        part = self.parts["train"]
        first = torch.randint(len(part) - self.length, (batch_size,), generator=stream("text", seed, step))
        return self._cut(part, first)  # inside the part, including the last target

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        """Batches of all windows; in the last window, places beyond the end of the text are not scored."""
        for windows in self._windows(-(-(len(self._tested) - 1) // self.length)).split(batch_size):
            yield self._cut(self._tested, windows * self.length)

    def _windows(self, there: int) -> Tensor:
        return torch.arange(there)[: self.test_windows]

    def _cut(self, part: Part, first: Tensor) -> Sequences:
        return part.packed(first, self.length) if self.packed else part.window(first, self.length)


@dataclass(frozen=True, kw_only=True)
class MaskedText(Text):
    """Prediction of masked tokens (BERT, arXiv:1810.04805): 80 % of chosen tokens are hidden, 10 % replaced, 10 % kept.

    Hidden tokens become the tokenizer's mask token, or 257 for bytes. Replaced tokens become a random id of text.
    """

    name = "masked-text"
    kind = "masked"
    metric = "accuracy"
    higher_is_better = True
    bytes_per_token = None
    length: int = option(128, "Tokens of a window.", least=2)
    share: float = option(0.15, "Share of the tokens chosen in training; at least one a window.", least=0, most=1)
    test_share: float = option(0.15, "The same in tests: the choice depends only on the window.", least=0, most=1)

    def check(self) -> None:
        super().check()
        require("packed", not self.packed, "False, as hidden tokens are chosen window by window", self.packed)

    @property
    def vocabulary(self) -> int:
        return max(super().vocabulary, self.encoder.mask + 1)

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        return self.hide(stream("mask", seed, step), super().train_batch(batch_size, seed, step).inputs, self.share)

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        """Batches of all whole windows."""
        for windows in self._windows(len(self._tested) // self.length).split(batch_size):
            rows = zip(windows.tolist(), self._cut(self._tested, windows * self.length).inputs, strict=True)
            yield join(self.hide(stream("test mask", n), row[None], self.test_share) for n, row in rows)

    def hide(self, generator: torch.Generator, tokens: Tensor, share: float) -> Sequences:
        """A batch of inputs with chosen tokens changed, and the original ones as targets, ``(B, T)`` each."""
        chance = torch.rand(tokens.shape, generator=generator)
        chosen = (chance < share) | (chance == chance.amin(1, keepdim=True))
        how = torch.rand(tokens.shape, generator=generator)
        other = torch.randint(self.encoder.size, tokens.shape, generator=generator)
        changed = torch.where(how < 0.8, self.encoder.mask, torch.where(how < 0.9, other, tokens))
        return Sequences(torch.where(chosen, changed, tokens), tokens.masked_fill(~chosen, IGNORED))


@dataclass(frozen=True, kw_only=True)
class Passkey(GeneratedTask):
    """Filler that repeats five sentences, among them one with a number, and at the end a question and its answer.

    ``... One of the special magic numbers for calm-harbor is: 4817205. ... The special magic number for calm-harbor
    mentioned in the provided text is: 4817205``. The digits at the end are scored, each given those before it;
    ``exact_match`` counts the sequences with all of them right. Every sequence has ``length`` bytes, so the filler may
    begin in the middle of a sentence.
    """

    name = "passkey"
    kind = "causal"
    metric = "exact_match"
    vocabulary = 256
    length: int = option(1024, "Bytes of a sequence.")
    digits: int = option(7, "Digits of the number.", least=1)
    test_examples: int = option(500, "Test sequences.", least=1)

    def check(self) -> None:
        low = 250 + 2 * self.digits
        require("length", self.length >= low, f"at least {low}, the needle, the question and some filler", self.length)

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        random = python_random(generator)
        # One byte more than the input: the last digit is only a target.
        tokens = torch.stack([as_bytes(self.text(random, self.length + 1)) for _ in range(count)]).long()
        targets = tokens[:, 1:].clone()
        targets[:, : -self.digits] = IGNORED
        return Sequences(tokens[:, :-1], targets)

    def text(self, random: Random, size: int) -> str:
        """``size`` characters, one byte each."""
        key = f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"
        number = "".join(random.choice("0123456789") for _ in range(self.digits))
        needle = f"One of the special magic numbers for {key} is: {number}. "
        question = f"The special magic number for {key} mentioned in the provided text is: {number}"
        room, turn = size - len(needle) - len(question), "".join(SENTENCES)
        filler = (turn * (room // len(turn) + 1))[-room:]
        place = random.choice([end.end() for end in finditer(r"\. ", filler)])
        return filler[:place] + needle + filler[place:] + question

    def answers(self, batch: Sequences) -> Tensor:
        return torch.zeros_like(batch.targets)
