"""Multi-query recall with several lengths (Based, arXiv:2402.18668): train on short sequences, test on longer ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.checks import at_least
from linattn.lab.tasks.text.mqar import Mqar
from linattn.lab.tasks.text.once import once
from linattn.lab.tasks.text.task import SequenceTask
from linattn.support.options import OptionError, SettingError
from linattn.support.seeds import stream

Case = tuple[int, int, int]  # length, pairs, examples


@dataclass(frozen=True, kw_only=True)
class MqarMix(SequenceTask):
    """MQAR with sequences of several kinds; a kind has one length and one number of pairs.

    A batch is of one kind, and batches of all kinds come in random order. An epoch has ``examples // batch_size``
    batches of each kind in ``train``. ``metrics`` adds the accuracy of each kind in ``test``, as ``accuracy_512x128``.

    Args:
        vocab: number of tokens, the same for all kinds.
        train: ``(length, pairs, examples)`` of each kind for training.
        test: the same for tests.
    """

    name = "mqar-mix"
    kind = "causal"
    vocab: int = 8192
    train: tuple[Case, ...] = (
        (64, 4, 100_000),
        (128, 8, 20_000),
        (256, 16, 20_000),
        (256, 32, 20_000),
        (256, 64, 20_000),
    )
    test: tuple[Case, ...] = (
        (64, 4, 1000),
        (64, 8, 1000),
        (64, 16, 1000),
        (128, 32, 1000),
        (256, 64, 1000),
        (512, 128, 1000),
        (1024, 256, 1000),
    )
    data_seed: int = 0

    def __post_init__(self) -> None:
        for option, cases in (("train", self.train), ("test", self.test)):
            if not cases or any(len(case) != 3 for case in cases):
                raise SettingError(option, f"must be (length, pairs, examples) of each kind, got {cases}")
        _ = self._train, self._test  # so that each checks its settings

    @once
    def _train(self) -> list[Mqar]:
        return [Mqar(vocab=self.vocab, length=t, pairs=d, train_examples=n, data_seed=self._seed_of(t, d))
                for t, d, n in self.train]  # fmt: skip

    @once
    def _test(self) -> list[Mqar]:
        return [Mqar(vocab=self.vocab, length=t, pairs=d, test_examples=n, data_seed=self._seed_of(t, d))
                for t, d, n in self.test]  # fmt: skip

    def _seed_of(self, length: int, pairs: int) -> int:
        """A seed for each kind: with one for all, a longer sequence would begin with the pairs of a shorter one."""
        return stream("kind", self.data_seed, length, pairs).initial_seed()

    @property
    def vocabulary(self) -> int:
        return self.vocab

    @property
    def length(self) -> int:  # type: ignore[override]
        return max(case[0] for case in (*self.train, *self.test))

    @property
    def train_size(self) -> int:
        return sum(examples for _, _, examples in self.train)

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        at_least("batch_size", batch_size, 1)
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
