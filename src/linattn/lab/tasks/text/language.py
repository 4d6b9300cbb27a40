"""Language modelling on any text: the next token, or hidden ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from linattn.lab.tasks.text.corpus import Bytes, Corpus, Encoder, Part, Pretrained, load_corpus
from linattn.lab.tasks.text.generated import require
from linattn.lab.tasks.text.task import IGNORED, Kind, Sequences, SequenceTask, join, once
from linattn.support.config import option
from linattn.support.documents import SOURCES
from linattn.support.options import check_integer
from linattn.support.seeds import stream


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
        for part in ("train", self.evaluate):
            tokens = len(self.corpus.parts[part])
            require("length", tokens > self.length, f"below the {tokens} tokens of the {part} part", self.length)

    @once
    def encoder(self) -> Encoder:
        return Bytes() if self.tokenizer is None else Pretrained(self.tokenizer, self.cache)

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

    def _train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        part = self.corpus.parts["train"]
        return self._cut(part, part.anywhere(stream("text", seed, step), batch_size, self.length))

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        """Batches of all windows; in the last window, places beyond the end of the text are not scored."""
        check_integer("batch_size", batch_size, 1)
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
    """

    name = "masked-text"
    kind = "masked"
    metric = "accuracy"
    higher_is_better = True
    length: int = option(128, "Tokens of a window.", least=2)
    share: float = option(0.15, "Share of the tokens chosen in training; at least one a window.", least=0, most=1)
    test_share: float = option(0.15, "The same in tests: the choice depends only on the window.", least=0, most=1)

    def check(self) -> None:
        super().check()
        require("packed", not self.packed, "False, as hidden tokens are chosen window by window", self.packed)

    @property
    def vocabulary(self) -> int:
        return max(self.corpus.vocabulary, self.encoder.mask + 1)

    @property
    def bytes_per_token(self) -> None:
        return None

    def _train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        batch = super()._train_batch(batch_size, seed, step)
        return self.hide(stream("mask", seed, step), batch.inputs, self.share)

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        """Batches of all whole windows."""
        check_integer("batch_size", batch_size, 1)
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
