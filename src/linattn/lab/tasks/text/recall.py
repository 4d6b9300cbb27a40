"""Associative recall and its kin: multi-query recall (MQAR) of Zoology (arXiv:2312.04927), the mix of its lengths of
Based (arXiv:2402.18668), and the tasks of MAD (arXiv:2403.17844)."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.lab.tasks.text.generated import GeneratedTask, choose, distinct, python_random, require
from linattn.lab.tasks.text.task import IGNORED, Kind, Sequences, SequenceTask, once
from linattn.support.config import option
from linattn.support.options import OptionError
from linattn.support.seeds import stream


@dataclass(frozen=True, kw_only=True)
class Mqar(GeneratedTask):
    """``k_1 v_1 ... k_D v_D``, then every key once more among filler; the target at each repeated key is its value.

    Keys are ``1 .. vocab/2 - 1``, values ``vocab/2 .. vocab - 1``, both without repetition in a sequence; filler is 0.
    Key number i is repeated at place ``2 D + 2 g_i``. The gaps ``g`` are drawn without repetition from
    ``0 .. (T - 2 D)/2 - 1`` with ``p(g) ~ (g + 1)^(power - 1)``: with a small power, keys are repeated early.

    Example:
        >>> batch = Mqar(vocab=12, length=8, pairs=2).batch(0, 1)
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[2, 11, 1, 10, 2, 0, 1, 0]], [[-100, -100, -100, -100, 11, -100, 10, -100]])
    """

    name = "mqar"
    kind = "causal"
    vocab: int = option(8192, "Number of tokens.")
    length: int = option(64, "Tokens of a sequence, T.")
    pairs: int = option(4, "Keys with values, D.", least=1)
    power: float = option(0.01, "The power in the distribution of gaps.", above=0)
    random_filler: bool = option(False, "Random tokens in place of 0, which are harder to tell from queries.")
    test_examples: int = option(3000, "Test sequences.", least=1)

    def check(self) -> None:
        fits = self.length % 2 == 0 and self.length >= 4 * self.pairs
        require(
            "length", fits, f"at least 4 x pairs = {4 * self.pairs}, room for every key twice, and even", self.length
        )
        low = 2 * self.pairs + 2
        require("vocab", self.vocab % 2 == 0 and self.vocab >= low, f"even and at least {low}", self.vocab)

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        half, written = self.vocab // 2, 2 * self.pairs
        keys = 1 + choose(generator, count, half - 1, self.pairs)
        values = half + choose(generator, count, half, self.pairs)
        gaps = torch.arange(1, (self.length - written) // 2 + 1).double() ** (self.power - 1)
        places = written + 2 * distinct(generator, count, gaps, self.pairs)
        shape = (count, self.length)
        inputs = torch.zeros(shape, dtype=torch.int64)
        if self.random_filler:
            inputs = torch.randint(self.vocab, shape, generator=generator)
        inputs[:, :written] = torch.stack([keys, values], 2).flatten(1)
        targets = torch.full(shape, IGNORED)
        inputs.scatter_(1, places, keys)
        targets.scatter_(1, places, values)
        return Sequences(inputs, targets)


@dataclass(frozen=True, kw_only=True)
class MqarMix(SequenceTask):
    """MQAR with sequences of several kinds; a kind has one length and one number of pairs.

    A batch is of one kind, and batches of all kinds come in random order. An epoch has ``examples // batch_size``
    batches of each kind in ``train``. ``metrics`` adds the accuracy of each kind in ``test``, as ``accuracy_512x128``.
    """

    name = "mqar-mix"
    kind = "causal"
    vocab: int = option(8192, "Number of tokens, the same for all kinds.")
    train: tuple[tuple[int, int, int], ...] = option(
        ((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)),
        "(length, pairs, examples) of each kind for training.",
    )
    test: tuple[tuple[int, int, int], ...] = option(
        ((64, 4, 1000), (64, 8, 1000), (64, 16, 1000), (128, 32, 1000), (256, 64, 1000), (512, 128, 1000),
         (1024, 256, 1000)),
        "The same for tests.",
    )  # fmt: skip
    data_seed: int = option(0, "Seed of fixed sets.")

    def check(self) -> None:
        for kinds in ("train", "test"):
            require(kinds, bool(getattr(self, kinds)), "(length, pairs, examples) of each kind", getattr(self, kinds))
        _ = self._train, self._test  # so that each checks its settings

    @once
    def _train(self) -> list[Mqar]:
        return [self._kind(length, pairs, train_examples=number) for length, pairs, number in self.train]

    @once
    def _test(self) -> list[Mqar]:
        return [self._kind(length, pairs, test_examples=number) for length, pairs, number in self.test]

    def _kind(self, length: int, pairs: int, **size: Any) -> Mqar:
        # With one seed for all kinds, a longer sequence would begin with the pairs of a shorter one.
        seed = stream("kind", self.data_seed, length, pairs).initial_seed()
        return Mqar(vocab=self.vocab, length=length, pairs=pairs, data_seed=seed, **size)

    @property
    def length(self) -> int:
        return max(kind[0] for kind in (*self.train, *self.test))

    @property
    def train_size(self) -> int:
        return sum(examples for _, _, examples in self.train)

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        each = torch.tensor([examples // batch_size for _, _, examples in self.train])
        total = int(each.sum())
        if not total:
            raise OptionError("batch_size", f"must leave a whole batch of some kind of {self.train}, got {batch_size}")
        epoch, number = divmod(step, total)
        place = int(torch.randperm(total, generator=stream("kinds", seed, epoch))[number])
        kind = int((each.cumsum(0) <= place).sum())
        inside = place - int(each[:kind].sum())
        return self._train[kind].train_batch(batch_size, seed, epoch * int(each[kind]) + inside)

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        for task in self._test:
            yield from task.test_batches(batch_size)

    def subsets(self, batch: Sequences) -> dict[str, Tensor]:
        scored = batch.targets != IGNORED
        here = (batch.inputs.shape[1], int(scored[0].sum()))
        # Every kind in every batch, as processes add up sums by name.
        return {f"{kind[0]}x{kind[1]}": scored & (kind[:2] == here) for kind in self.test}


@dataclass(frozen=True, kw_only=True)
class MadTask(GeneratedTask):
    """What the tasks of MAD have in common."""

    kind: ClassVar[Kind] = "causal"
    vocab: int = option(16, "Number of tokens.", least=3)
    length: int = option(128, "Tokens of a sequence.", least=2)
    test_examples: int = option(1280, "Test sequences.", least=1)


@dataclass(frozen=True, kw_only=True)
class InContextRecall(MadTask):
    """``k v k v ...``: random keys, each with one value in the whole sequence; the last key appeared before.

    Of the tokens without noise, the first half are keys and the second half values. Training scores every next token,
    a test only the values of keys that appeared before. The last ``noise_vocab`` tokens of ``vocab`` are noise: with
    chance ``noise``, a pair is replaced by two of them, except the last pair and one other.

    Example:
        >>> batch = InContextRecall(vocab=4, length=8).batch(3, 1)
        >>> batch.inputs.shape, (batch.targets != IGNORED).nonzero()[:, 1].tolist()
        (torch.Size([1, 8]), [2, 4, 6])
    """

    name = "mad-recall"
    noise: float = option(0.0, "Share of pairs that are noise.", least=0, most=0.99)
    noise_vocab: int = option(0, "Tokens of noise.", least=0)

    def check(self) -> None:
        require("length", self.length % 2 == 0 and self.length >= 4, "even and at least 4", self.length)
        require("vocab", self.vocab >= self.noise_vocab + 4, f"at least {self.noise_vocab + 4}", self.vocab)
        require("noise_vocab", self.noise == 0 or self.noise_vocab > 0, "at least 1 where there is noise", 0)

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        tokens = self.vocab - self.noise_vocab
        num_keys, pairs = tokens // 2, self.length // 2
        keys = torch.randint(num_keys, (count, pairs), generator=generator)
        noisy = torch.rand(count, pairs, generator=generator) < self.noise
        # At least one pair stays, so that the last key has something to recall.
        noisy.scatter_(1, torch.randint(pairs - 1, (count, 1), generator=generator), False)
        noisy[:, -1] = False
        shown = F.one_hot(keys, num_keys).bool() & ~noisy[..., None]  # (count, pairs, keys)
        before = shown.cumsum(1) - shown.long() > 0
        keys[:, -1:] = distinct(generator, count, before[:, -1].double(), 1)
        seen = before.gather(2, keys[..., None])[..., 0] & ~noisy
        values = num_keys + torch.randint(tokens - num_keys, (count, num_keys), generator=generator)
        filler = torch.randint(tokens, max(self.vocab, tokens + 1), (count, pairs, 2), generator=generator)
        inputs = torch.where(noisy[..., None], filler, torch.stack([keys, values.gather(1, keys)], 2)).flatten(1)
        if train:
            return Sequences(inputs, F.pad(inputs[:, 1:], (0, 1), value=IGNORED))
        targets = torch.full_like(inputs, IGNORED)
        targets[:, ::2] = inputs[:, 1::2].masked_fill(~seen, IGNORED)
        return Sequences(inputs, targets)


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(InContextRecall):
    """In-context recall in which a share ``noise`` of the pairs is replaced by noise."""

    name = "mad-noisy-recall"
    vocab: int = option(32, "Number of tokens, noise included.")
    noise: float = option(0.2, "Share of pairs that are noise.", least=0, most=0.99)
    noise_vocab: int = option(16, "Tokens of noise.", least=0)


@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(MadTask):
    """``k v k v ...``, where a key has 1 to ``key_tokens`` different tokens and a value 1 to ``value_tokens``.

    Each key has one value in the whole sequence, and the last pair repeats an earlier one. In tests all keys have
    ``key_tokens`` tokens, and only values of keys that appeared before are scored; training scores every next token.
    Sequences are padded on the left with the last token of the vocabulary, which ``key_mask`` masks.
    """

    name = "mad-fuzzy-recall"
    key_tokens: int = option(3, "Most tokens of a key.", least=1)
    value_tokens: int = option(3, "Most tokens of a value.", least=1)

    def check(self) -> None:
        longest = max(self.key_tokens, self.value_tokens)
        low = 2 * longest + 2
        require("vocab", self.vocab >= low, f"at least {low}, two motifs of {longest} and padding", self.vocab)
        low = 3 * (self.key_tokens + self.value_tokens)
        require("length", self.length >= low, f"at least {low}, three pairs", self.length)

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        random, pad = python_random(generator), self.vocab - 1
        inputs = torch.full((count, self.length), pad)
        targets = torch.full((count, self.length), IGNORED)
        for row in range(count):
            tokens, scored = self._sequence(random, train)
            inputs[row, -len(tokens) :] = torch.tensor(tokens)
            targets[row, -len(tokens) :] = torch.tensor(scored)
        mask = inputs != pad
        if train:
            targets = F.pad(inputs[:, 1:], (0, 1), value=IGNORED).masked_fill(~mask, IGNORED)
        return Sequences(inputs, targets, mask)

    def _sequence(self, random: Random, train: bool) -> tuple[list[int], list[int]]:
        """Tokens, and at each the target: the next token if that is part of a value whose key appeared before."""
        half = (self.vocab - 1) // 2
        smallest = 1 if train else self.key_tokens

        def motif(first: int, last: int, low: int, high: int) -> list[int]:
            return random.sample(range(first, last), random.randint(low, high))

        values: dict[tuple[int, ...], list[int]] = {}
        pairs: list[tuple[tuple[int, ...], bool]] = []
        probe: tuple[int, ...] = ()
        used = 0
        while True:
            key = tuple(motif(0, half, smallest, self.key_tokens))
            value = values.get(key) or motif(half, self.vocab - 1, 1, self.value_tokens)
            size = len(key) + len(value)
            if pairs and used + size + len(probe) + len(values[probe]) > self.length:
                break
            pairs.append((key, key in values))
            values[key] = value
            used += size
            # Every pair has the same chance of being the one repeated at the end.
            if random.random() * len(pairs) < 1 and used + size <= self.length:
                probe = key
        tokens: list[int] = []
        scored: list[int] = []
        for key, known in [*pairs, (probe, True)]:
            value = values[key]
            tokens += [*key, *value]
            scored += [IGNORED] * (len(key) - 1) + (value if known else [IGNORED] * len(value)) + [IGNORED]
        return tokens, scored


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(MadTask):
    """``copies`` tokens at random places among blanks, the copy token, and ``copies`` blanks to copy them to.

    The copy token is ``vocab - 1``, the blank ``vocab - 2``. The tokens, in their order, are the targets at the last
    blanks.
    """

    name = "mad-selective-copying"
    length: int = option(256, "Tokens of a sequence.")
    copies: int = option(16, "Tokens to copy.", least=1)

    def check(self) -> None:
        low = 2 * self.copies + 1
        require("length", self.length >= low, f"at least 2 x copies + 1 = {low}", self.length)

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
class Compression(MadTask):
    """Random tokens and a last one, ``vocab - 1``; the vector at the last token must encode them all.

    The vector gives ``classes = length x vocab`` logits, read as ``(length, vocab)``: the token at each place, the
    last one included, as in the targets of the paper. (The paper adds an encoding of the place to the vector and
    decodes with a perceptron of two layers. The decoder of this task is a linear head for each place, as in any
    classifier.)
    """

    name = "mad-compression"
    kind = "classification"
    pooling = "last"
    length: int = option(32, "Tokens of a sequence.", least=2)

    @property
    def classes(self) -> int:
        return self.length * self.vocab

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        inputs = torch.randint(self.vocab - 1, (count, self.length), generator=generator)
        inputs[:, -1] = self.vocab - 1
        return Sequences(inputs, inputs.clone())


@dataclass(frozen=True, kw_only=True)
class Memorization(MadTask):
    """``k ? k ? ...``: predict at each ``?`` (the token ``vocab - 1``) the value of the key before, from a fixed table.

    The table maps the first half of the other tokens one to one to the second half, and depends on ``data_seed`` alone.
    It cannot be read from a sequence and has to be learned.
    """

    name = "mad-memorization"
    vocab: int = option(256, "Number of tokens.", least=3)
    length: int = option(32, "Tokens of a sequence, even.", least=2)
    train_examples: int | None = option(256, "Size of a fixed training set; none: new ones in each step.", least=1)

    def check(self) -> None:
        require("length", self.length % 2 == 0, "even", self.length)

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
