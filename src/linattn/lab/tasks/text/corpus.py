"""A text as token ids, bytes or those of a tokenizer; cut into three parts, and windows of it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from linattn.lab.tasks.text.task import IGNORED, Sequences, content_digest, once
from linattn.support.documents import as_text, encode, read_documents
from linattn.support.extras import need
from linattn.support.files import write_atomically
from linattn.support.options import OptionError


class Encoder(Protocol):
    """Encodes text. ``end`` is the id after documents, ``mask`` that of hidden tokens; both may be ``size`` or more."""

    @property
    def size(self) -> int:
        """Ids of text are below this number."""

    @property
    def end(self) -> int: ...

    @property
    def mask(self) -> int: ...

    def encode(self, document: Tensor) -> Tensor: ...


class Bytes:
    """The encoder without a tokenizer: ids are bytes."""

    size, end, mask = 256, 256, 257

    def encode(self, document: Tensor) -> Tensor:
        return document


class Pretrained:
    """A tokenizer in a folder, as saved by transformers; with a folder ``cache``, texts are encoded only once."""

    def __init__(self, folder: str, cache: str | None = None) -> None:
        if not Path(folder).expanduser().is_dir():
            raise OptionError("tokenizer", f"must be a folder with a tokenizer of transformers, got {folder}")
        need("reading a tokenizer", "transformers")
        self.folder, self.cache = Path(folder).expanduser(), cache

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
        return self._special("eos_token_id", "sep_token_id", beyond=0)

    @property
    def mask(self) -> int:
        return self._special("mask_token_id", beyond=1)

    def _special(self, *names: str, beyond: int) -> int:
        found = [value for name in names if (value := getattr(self.tokenizer, name, None)) is not None]
        return found[0] if found else self.size + beyond

    def encode(self, document: Tensor) -> Tensor:
        """Encode a document as int32 ``(n,)``; ids in the cache are mapped into memory."""
        if self.cache is None:
            return encode(self.tokenizer, as_text(document))
        digest = hashlib.blake2b(self._content.encode() + document.numpy().tobytes(), digest_size=12).hexdigest()
        path = Path(self.cache).expanduser() / f"{digest}.int32"
        if not path.exists():
            tokens = encode(self.tokenizer, as_text(document))
            write_atomically(path, lambda temporary: temporary.write_bytes(tokens.numpy().tobytes()))
        size = path.stat().st_size // 4
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.int32)


PARTS = ("train", "valid", "test")
ENWIK8 = 100_000_000  # bytes; a file of exactly this size is cut in the usual way


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
        inputs, targets = found[:, :-1].masked_fill(beyond[:, :-1], 0), found[:, 1:]
        return Sequences(inputs, targets.masked_fill(beyond[:, 1:], IGNORED))

    def anywhere(self, generator: torch.Generator, count: int, length: int) -> Tensor:
        """Random starts ``(count,)`` of windows that lie inside the part, including their last target."""
        return torch.randint(len(self) - length, (count,), generator=generator)

    def packed(self, first: Tensor, length: int) -> Sequences:
        """Windows laid end to end in one row ``(1, B x length)``, cut where a document begins.

        ``cu_seqlens`` holds the cuts, and no target is a token of another document.
        """
        batch, count = self.window(first, length), len(first)
        places = first[:, None] + torch.arange(length)
        begins = torch.isin(places, self.starts)
        begins[:, 0] = True
        targets = batch.targets.masked_fill(torch.isin(places + 1, self.starts), IGNORED)
        offsets = begins.flatten().nonzero()[:, 0]
        cu_seqlens = torch.cat([offsets, torch.tensor([count * length])]).to(torch.int32)
        return Sequences(batch.inputs.view(1, -1), targets.view(1, -1), cu_seqlens=cu_seqlens)


@dataclass(frozen=True, eq=False)
class Corpus:
    """The parts of a text by name; token ids are below ``vocabulary``."""

    parts: dict[str, Part]
    vocabulary: int


def load_corpus(source: str, encoder: Encoder, *, valid: float = 0.05, test: float = 0.05) -> Corpus:
    """Load the text of ``source``: a share ``test`` of its bytes at the end, ``valid`` before it, the rest to train on.

    A file of 100,000,000 bytes, such as enwik8, gives parts of 90, 5 and 5 million. If there are several documents,
    each ends with ``encoder.end``, and cuts move to the beginning of the next document if that leaves no part empty.
    """
    documents = read_documents(source)
    several = len(documents) > 1
    cuts = _cuts([len(document) for document in documents], valid, test)
    parts = {}
    for name, first, last in zip(PARTS, (0, *cuts), (*cuts, None), strict=True):
        parts[name] = _part(encoder, _between(documents, first, last), several)
    return Corpus(parts, max(encoder.size, encoder.end + 1 if several else 0))


def _cuts(sizes: list[int], valid: float, test: float) -> tuple[int, int]:
    total = sum(sizes)
    if len(sizes) == 1 and total == ENWIK8:
        return 90_000_000, 95_000_000
    wanted = round(total * (1 - valid - test)), round(total * (1 - test))
    borders = torch.tensor([0, *sizes]).cumsum(0).tolist()
    moved = tuple(min((border for border in borders if border >= cut), default=total) for cut in wanted)
    fine = moved[0] > 0 and (moved[0] < moved[1] or not valid) and (moved[1] < total or not test)
    return (moved[0], moved[1]) if fine else wanted


def _between(documents: list[Tensor], first: int, last: int | None) -> list[Tensor]:
    """The pieces of the documents in bytes ``first .. last``, as views."""
    found, offset = [], 0
    for document in documents:
        end = len(document) if last is None else min(last - offset, len(document))
        piece = document[max(first - offset, 0) : max(end, 0)]
        offset += len(document)
        if len(piece):
            found.append(piece)
    return found


def _part(encoder: Encoder, documents: list[Tensor], several: bool) -> Part:
    encoded = [encoder.encode(document) for document in documents]
    size = sum(len(document) for document in documents)
    if not several:  # not copied: a file that is mapped into memory stays so
        tokens = encoded[0] if encoded else torch.zeros(0, dtype=torch.uint8)
        return Part(tokens, torch.zeros(1, dtype=torch.int64), size)
    end = torch.tensor([encoder.end], dtype=torch.int32)
    pieces = [torch.cat([tokens.int(), end]) for tokens in encoded]
    lengths = torch.tensor([0, *(len(piece) for piece in pieces)])
    return Part(torch.cat(pieces) if pieces else end[:0], lengths.cumsum(0)[:-1], size)
