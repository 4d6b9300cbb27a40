"""A text as token ids, cut into three parts, and windows of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.checks import between
from linattn.lab.tasks.text.encoders import Encoder
from linattn.support.documents import read_documents
from linattn.support.options import SettingError

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
    between("valid", valid, 0, 0.9)
    between("test", test, 0, 0.9)
    between("valid + test", valid + test, 0, 0.95)
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


def check_length(part: str, tokens: int, length: int) -> None:
    """Raise unless a part has enough tokens for one window and its last target."""
    if tokens <= length:
        raise SettingError("length", f"must be below the {tokens} tokens of the {part} part, got {length}")
