"""Multi-query associative recall (Zoology, arXiv:2312.04927): many look-ups in one sequence.

``mqar-mix`` has several lengths, as in Based (arXiv:2402.18668): train on short sequences, test on longer ones.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.lab.tasks.text.generated import GeneratedTask, choose, distinct, require
from linattn.lab.tasks.text.task import IGNORED, Sequences, SequenceTask, once
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
        require("length", self.length % 2 == 0, "even", self.length)
        allowed = f"at least 4 x pairs = {4 * self.pairs}, room for every key twice"
        require("length", self.length >= 4 * self.pairs, allowed, self.length)
        low = 2 * self.pairs + 2
        require("vocab", self.vocab % 2 == 0 and self.vocab >= low, f"even and at least {low}", self.vocab)

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        half, written = self.vocab // 2, 2 * self.pairs
        keys = 1 + choose(generator, count, half - 1, self.pairs)
        values = half + choose(generator, count, half, self.pairs)
        gaps = torch.arange(1, (self.length - written) // 2 + 1).double() ** (self.power - 1)
        places = written + 2 * distinct(generator, count, gaps, self.pairs)
        if self.random_filler:
            inputs = torch.randint(self.vocab, (count, self.length), generator=generator)
        else:
            inputs = torch.zeros(count, self.length, dtype=torch.int64)
        inputs[:, :written] = torch.stack([keys, values], 2).flatten(1)
        targets = torch.full_like(inputs, IGNORED)
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

    def _train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
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

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        sums = super().score(logits, batch)
        here = f"{batch.inputs.shape[1]}x{int((batch.targets[0] != IGNORED).sum())}"
        for length, pairs, _ in self.test:
            name = f"{length}x{pairs}"
            for what in ("correct", "total"):  # for every kind in every batch, as processes add up sums by name
                sums[f"{what}_{name}"] = sums[what] if name == here else torch.zeros_like(sums[what])
        return sums

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        found = super().metrics(sums)
        for length, pairs, _ in self.test:
            name = f"{length}x{pairs}"
            found[f"accuracy_{name}"] = 100 * float(sums[f"correct_{name}"]) / max(float(sums[f"total_{name}"]), 1.0)
        return found
