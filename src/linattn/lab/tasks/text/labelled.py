"""Tasks of classifying sequences that are read from files."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from linattn.lab.tasks.stratify import stratified, without
from linattn.lab.tasks.text.generated import require
from linattn.lab.tasks.text.task import Sequences, SequenceTask, once, shuffled_batch
from linattn.support.config import option
from linattn.support.options import OptionError, check_integer


@dataclass(frozen=True, eq=False)
class Examples:
    """N sequences end to end in ``tokens``, with number n from ``offsets[n]`` to ``offsets[n + 1]``; ``labels (N,)``.

    They are not padded: padding all to the longest would take several times the memory for most data.
    """

    tokens: Tensor
    offsets: Tensor
    labels: Tensor
    length: int

    @classmethod
    def of(cls, sequences: Sequence[Tensor], labels: Sequence[float], length: int) -> "Examples":
        sizes = torch.tensor([0, *(len(sequence) for sequence in sequences)])
        return cls(torch.cat(list(sequences)), sizes.cumsum(0), torch.tensor(labels), length)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor, pad: int) -> Sequences:
        """The batch of these rows, padded on the right to ``length``; without a ``key_mask`` if nothing is padded."""
        place = self.offsets[rows, None] + torch.arange(self.length)
        mask = place < self.offsets[rows + 1, None]
        inputs = self.tokens[place.clamp(max=len(self.tokens) - 1)].long().masked_fill(~mask, pad)
        return Sequences(inputs, self.labels[rows], None if bool(mask.all()) else mask)


@dataclass(frozen=True, kw_only=True)
class LabelledTask(SequenceTask):
    """A task with labelled examples from files, which are read once and shuffled anew in each training epoch."""

    kind = "classification"
    pad: ClassVar[int] = 0
    data: str = option(help="files with labelled examples")
    hold_out: float = option(0.0, "Share of the training examples left out, for choosing options.", least=0, most=0.9)
    evaluate: Literal["test", "valid"] = option("test", "Test on the test examples, or on those held out.")
    data_seed: int = option(0, "Seed of the choice of examples to hold out.")

    def check(self) -> None:
        if self.evaluate == "valid":
            require("hold_out", self.hold_out > 0, "above 0 to evaluate on what is held out", self.hold_out)

    @abstractmethod
    def read(self, part: str) -> Examples:
        """Read the examples of ``part``, "train" or "test"."""

    def train_rows(self) -> int:
        """How many training examples the files hold; tasks override it if they can count without reading examples."""
        return len(self._train)

    @property
    def train_size(self) -> int:
        """Training examples of an epoch, without those held out."""
        rows = self.train_rows()
        return rows - round(self.hold_out * rows)

    def strata(self, labels: Tensor) -> Tensor:
        """The stratum of each example, from 0 on; the same share of each stratum is held out."""
        return labels

    @once
    def _train(self) -> Examples:
        return self.read("train")

    @once
    def _test(self) -> Examples:
        return self._train if self.evaluate == "valid" else self.read("test")

    @once
    def _held(self) -> Tensor:
        return stratified(self.strata(self._train.labels), round(self.hold_out * len(self._train)), self.data_seed)

    @once
    def _kept(self) -> Tensor:
        return without(len(self._train), self._held)

    def _train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        return self._train.take(self._kept[shuffled_batch(len(self._kept), batch_size, seed, step)], self.pad)

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        check_integer("batch_size", batch_size, 1)
        rows = self._held if self.evaluate == "valid" else torch.arange(len(self._test))
        for some in rows.split(batch_size):
            yield self._test.take(some, self.pad)


def find_jsonl(data: str, names: tuple[str, ...]) -> Path:
    """The first of these jsonl files that a folder has, gzipped or not."""
    folder = Path(data).expanduser()
    tried = [f"{name}{end}" for name in names for end in (".jsonl", ".jsonl.gz")]
    if not folder.is_dir():
        wanted = " and ".join(f"{name}.jsonl" for name in dict.fromkeys(("train", names[0])))
        raise OptionError("data", f"must be a folder with {wanted}, got {data}")
    found = [folder / name for name in tried if (folder / name).is_file()]
    if not found:
        raise OptionError("data", f"{data} has none of {', '.join(tried)}")
    return found[0]
