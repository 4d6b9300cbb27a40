"""Reads text as bytes: one file, several, or the lines of a jsonl file; and encodes it with a tokenizer."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.support.options import SettingError

PIECE = 1 << 20  # characters a tokenizer gets at once: a whole corpus would take tens of times its size in memory
ARCHIVES = (".zip", ".bz2", ".xz", ".zst", ".7z", ".tar", ".tgz")
SOURCES = "a text file, the same packed as .gz, a folder of .txt files, or a .jsonl file whose lines have a text"


def read_documents(source: str) -> list[Tensor]:
    """The documents of ``source`` as bytes, uint8 ``(n,)`` each; a plain file is one document, mapped into memory."""
    path, found = Path(source).expanduser(), []
    if path.is_dir():
        found = [_mapped(file) for file in sorted(path.glob("*.txt"))]
    elif not path.is_file():
        raise SettingError("data", f"{source} does not exist. Looked for {SOURCES}")
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        found = [as_bytes(row_text(path, row)) for row in read_jsonl(path)]
    elif path.suffix.lower() in ARCHIVES:
        raise SettingError("data", f"{source} is an archive, whose own bytes are no text: unpack it, or pack it as .gz")
    else:
        found = [as_bytes(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else _mapped(path)]
    found = [document for document in found if len(document)]
    if not found:
        raise SettingError("data", f"{source} has no text. Looked for {SOURCES}")
    return found


def _mapped(path: Path) -> Tensor:
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else as_bytes("")


def as_bytes(text: str | bytes) -> Tensor:
    data = text.encode() if isinstance(text, str) else text
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def as_text(document: Tensor) -> str:
    """Decode a document; bytes that are not UTF-8, as at a cut, are left out."""
    return bytes(document.numpy()).decode("utf-8", errors="ignore")


def encode(tokenizer: Any, text: str) -> Tensor:
    """Token ids int32 ``(n,)`` by a tokenizer of transformers, without marks of its own.

    Long texts are encoded in pieces that end at a new line, else at a space, so that words are not cut if possible.
    """
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


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file, gzipped or not; empty lines are skipped, errors name the line."""
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SettingError("data", f"{path}:{number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise SettingError("data", f"{path}:{number} must be an object like {{...}}, got {line.strip()[:40]}")
        yield row


def _lines(path: Path) -> Iterator[str]:
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as lines:
        yield from lines


def row_text(path: Path, row: dict[str, Any]) -> str:
    if not isinstance(row.get("text"), str):
        raise SettingError("data", f'{path}: every line needs a "text", got {", ".join(row) or "an empty object"}')
    return str(row["text"])
