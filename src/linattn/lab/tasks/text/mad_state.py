"""Tasks of MAD (arXiv:2403.17844) on what a state or the weights can hold: copying, compression, memorization."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.checks import at_least, require
from linattn.lab.tasks.text.draws import choose
from linattn.lab.tasks.text.generated import GeneratedTask
from linattn.lab.tasks.text.once import once
from linattn.support.seeds import stream


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(GeneratedTask):
    """``copies`` tokens at random places among blanks, the copy token, and ``copies`` blanks to copy them to.

    The copy token is ``vocab - 1``, the blank ``vocab - 2``. The tokens, in their order, are the targets at the last
    blanks.

    Example:
        >>> batch = SelectiveCopying(vocab=8, length=9, copies=2).batch(0, 1)
        >>> batch.inputs[0, -3:].tolist(), (batch.targets[0, :7] == IGNORED).all().item()
        ([7, 6, 6], True)
    """

    name = "mad-selective-copying"
    kind = "causal"
    vocab: int = 16
    length: int = 256
    copies: int = 16
    test_examples: int = 1280

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("vocab", self.vocab, 3)
        at_least("copies", self.copies, 1)
        low = 2 * self.copies + 1
        require("length", self.length >= low, f"at least 2 x copies + 1 = {low}", self.length)

    @property
    def vocabulary(self) -> int:
        return self.vocab

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        shown = self.length - self.copies - 1
        tokens = torch.randint(self.vocab - 2, (count, self.copies), generator=generator)
        places = choose(generator, count, shown, self.copies).sort(1).values
        inputs = torch.full((count, self.length), self.vocab - 2).scatter_(1, places, tokens)
        inputs[:, shown] = self.vocab - 1
        targets = torch.full_like(inputs, IGNORED)
        targets[:, shown + 1 :] = tokens
        return Sequences(inputs, targets)


@dataclass(frozen=True, kw_only=True)
class Compression(GeneratedTask):
    """Random tokens and a last one, ``vocab - 1``; the vector at the last token must encode them all.

    The vector gives ``classes = length x vocab`` logits, read as ``(length, vocab)``: the token at each place, the
    last one included, as in the targets of the paper. (The paper adds an encoding of the place to the vector and
    decodes with a perceptron of two layers. The decoder of this task is a linear head for each place, as in any
    classifier.)
    """

    name = "mad-compression"
    kind = "classification"
    pooling = "last"
    vocab: int = 16
    length: int = 32
    test_examples: int = 1280

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("vocab", self.vocab, 3)
        at_least("length", self.length, 2)

    @property
    def vocabulary(self) -> int:
        return self.vocab

    @property
    def classes(self) -> int:
        return self.length * self.vocab

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        inputs = torch.randint(self.vocab - 1, (count, self.length), generator=generator)
        inputs[:, -1] = self.vocab - 1
        return Sequences(inputs, inputs.clone())


@dataclass(frozen=True, kw_only=True)
class Memorization(GeneratedTask):
    """``k ? k ? ...``: predict at each ``?`` (the token ``vocab - 1``) the value of the key before, from a fixed table.

    The table maps the first half of the other tokens one to one to the second half, and depends on ``data_seed`` alone.
    It cannot be read from a sequence and has to be learned.
    """

    name = "mad-memorization"
    kind = "causal"
    vocab: int = 256
    length: int = 32
    train_examples: int | None = 256
    test_examples: int = 1280

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("vocab", self.vocab, 3)
        require("length", self.length % 2 == 0 and self.length >= 2, "even and at least 2", self.length)

    @property
    def vocabulary(self) -> int:
        return self.vocab

    @once
    def table(self) -> Tensor:
        """``(keys,)``: the value of each key."""
        keys = (self.vocab - 1) // 2
        values = torch.randperm(self.vocab - 1 - keys, generator=stream("table", self.data_seed, self.vocab))
        return keys + values[:keys]

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        keys = torch.randint(len(self.table), (count, self.length // 2), generator=generator)
        inputs = torch.full((count, self.length), self.vocab - 1)
        targets = torch.full_like(inputs, IGNORED)
        inputs[:, ::2] = keys
        targets[:, 1::2] = self.table[keys]
        return Sequences(inputs, targets)
