"""Language modelling on any text: the next token, or hidden ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from linattn.lab.tasks.text.batch import IGNORED, Sequences, join
from linattn.lab.tasks.text.checks import at_least, between, one_of, require
from linattn.lab.tasks.text.corpus import Corpus, Part, check_length, load_corpus
from linattn.lab.tasks.text.encoders import Encoder, encoder
from linattn.lab.tasks.text.once import once
from linattn.lab.tasks.text.task import Kind, SequenceTask
from linattn.support.documents import SOURCES
from linattn.support.seeds import stream


@dataclass(frozen=True, kw_only=True)
class Text(SequenceTask):
    """Prediction of the next byte or token of a text.

    Training takes windows at random places; tests take consecutive windows, which cover all of the text.

    Args:
        data: a text file (enwik8), plain or ``.gz``, a folder of ``.txt`` files, or a ``.jsonl`` file.
        length: tokens of a window.
        tokenizer: a folder with a tokenizer of transformers; None: bytes.
        cache: a folder that keeps the token ids of texts for later runs.
        valid, test: shares of the text, taken from its end; enwik8 is cut in its usual way.
        evaluate: the part that tests use, "test" or "valid".
        test_windows: how many windows to test on, from the beginning of that part; None: all.
        packed: lay the windows of a batch end to end in one row, with ``cu_seqlens`` that also cut it where a document
            begins, so that no document sees another one.
    """

    name = "text"
    kind: ClassVar[Kind] = "causal"
    metric = "bits_per_byte"
    higher_is_better = False
    needs = MappingProxyType({"data": SOURCES})
    data: str
    length: int = 1024
    tokenizer: str | None = None
    cache: str | None = None
    valid: float = 0.05
    test: float = 0.05
    evaluate: str = "test"
    test_windows: int | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        at_least("length", self.length, 2)
        one_of("evaluate", self.evaluate, ("test", "valid"))
        if self.test_windows is not None:
            at_least("test_windows", self.test_windows, 1)
        for part in ("train", self.evaluate):
            check_length(part, len(self.corpus.parts[part]), self.length)

    @once
    def encoder(self) -> Encoder:
        return encoder(self.tokenizer, self.cache)

    @once
    def corpus(self) -> Corpus:
        return load_corpus(self.data, self.encoder, valid=self.valid, test=self.test)

    @property
    def vocabulary(self) -> int:
        return self.corpus.vocabulary

    @property
    def bytes_per_token(self) -> float | None:
        part = self._tested
        return part.num_bytes / len(part)

    @property
    def _tested(self) -> Part:
        return self.corpus.parts[self.evaluate]

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        at_least("batch_size", batch_size, 1)
        part = self.corpus.parts["train"]
        return self._cut(part, part.anywhere(stream("text", seed, step), batch_size, self.length))

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        """Batches of all windows; in the last window, places beyond the end of the text are not scored."""
        at_least("batch_size", batch_size, 1)
        windows = self._windows(-(-(len(self._tested) - 1) // self.length))
        for first in range(0, windows, batch_size):
            yield self._test_batch(torch.arange(first, min(first + batch_size, windows)))

    def _windows(self, there: int) -> int:
        return there if self.test_windows is None else min(there, self.test_windows)

    def _test_batch(self, windows: Tensor) -> Sequences:
        return self._cut(self._tested, windows * self.length)

    def _cut(self, part: Part, first: Tensor) -> Sequences:
        return part.packed(first, self.length) if self.packed else part.window(first, self.length)


@dataclass(frozen=True, kw_only=True)
class MaskedText(Text):
    """Prediction of masked tokens (BERT, arXiv:1810.04805): 80 % of chosen tokens are hidden, 10 % replaced, 10 % kept.

    Hidden tokens become the tokenizer's mask token, or 257 for bytes. Replaced tokens become a random id of text.

    Args:
        share: share of the tokens that are chosen in training; at least one in each window.
        test_share: the same in tests, where the choice depends only on the window.
    """

    name = "masked-text"
    kind = "masked"
    metric = "accuracy"
    higher_is_better = True
    length: int = 128
    share: float = 0.15
    test_share: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        require("packed", not self.packed, "False, as hidden tokens are chosen window by window", self.packed)
        between("share", self.share, 0, 1)
        between("test_share", self.test_share, 0, 1)

    @property
    def vocabulary(self) -> int:
        return max(self.corpus.vocabulary, self.encoder.mask + 1)

    @property
    def bytes_per_token(self) -> None:
        return None

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        batch = super().train_batch(batch_size, seed, step)
        return self.hide(stream("mask", seed, step), batch.inputs, self.share)

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        """Batches of all whole windows."""
        at_least("batch_size", batch_size, 1)
        windows = self._windows(len(self._tested) // self.length)
        for first in range(0, windows, batch_size):
            numbers = range(first, min(first + batch_size, windows))
            tokens = self._test_batch(torch.tensor(numbers)).inputs
            rows = zip(numbers, tokens, strict=True)
            yield join(self.hide(stream("test mask", n), row[None], self.test_share) for n, row in rows)

    def hide(self, generator: torch.Generator, tokens: Tensor, share: float) -> Sequences:
        """A batch of inputs with chosen tokens changed, and the original ones as targets, ``(B, T)`` each."""
        chance = torch.rand(tokens.shape, generator=generator)
        chosen = (chance < share) | (chance == chance.amin(1, keepdim=True))
        how = torch.rand(tokens.shape, generator=generator)
        other = torch.randint(self.encoder.size, tokens.shape, generator=generator)
        changed = torch.where(how < 0.8, self.encoder.mask, torch.where(how < 0.9, other, tokens))
        return Sequences(torch.where(chosen, changed, tokens), tokens.masked_fill(~chosen, IGNORED))
