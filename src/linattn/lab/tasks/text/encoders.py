"""From text to token ids: bytes, or a tokenizer of Hugging Face."""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from linattn.lab.tasks.text.content import content_digest
from linattn.lab.tasks.text.once import once
from linattn.support.documents import as_text
from linattn.support.extras import need
from linattn.support.files import write_atomically
from linattn.support.options import SettingError

PIECE = 1 << 20  # bytes a tokenizer gets at once: for a whole corpus it would need tens of times its size in memory


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
            raise SettingError("tokenizer", f"must be a folder with a tokenizer of transformers, got {folder}")
        need("reading a tokenizer", "transformers")
        self.folder, self.cache = Path(folder).expanduser(), cache

    @once
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    @once
    def _content(self) -> str:
        """Digest of all files that may decide how text is encoded: some tokenizers have a separate file of words."""
        return content_digest([self.folder])

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
            return self._encode(document)
        digest = hashlib.blake2b(self._content.encode() + document.numpy().tobytes(), digest_size=12).hexdigest()
        path = Path(self.cache).expanduser() / f"{digest}.int32"
        if not path.exists():
            tokens = self._encode(document)
            write_atomically(path, lambda temporary: temporary.write_bytes(tokens.numpy().tobytes()))
        size = path.stat().st_size // 4
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.int32)

    def _encode(self, document: Tensor) -> Tensor:
        text, found, first = as_text(document), [], 0
        while first < len(text):
            last = min(first + PIECE, len(text))
            if last < len(text):  # pieces end at a new line, else at a space, so that words are not cut if possible
                cuts = (text.rfind(sign, first + 1, last) for sign in ("\n", " "))
                last = next((cut for cut in cuts if cut > 0), last)
            found += self.tokenizer(text[first:last], add_special_tokens=False, verbose=False)["input_ids"]
            first = last
        return torch.tensor(found, dtype=torch.int32)


def encoder(tokenizer: str | None, cache: str | None = None) -> Encoder:
    """The encoder of a tokenizer's folder; without one, bytes."""
    return Bytes() if tokenizer is None else Pretrained(tokenizer, cache)
