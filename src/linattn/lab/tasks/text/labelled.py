"""Tasks of classifying sequences that are read from files."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from linattn.lab.tasks.stratify import stratified, without
from linattn.lab.tasks.text.batch import Sequences
from linattn.lab.tasks.text.checks import at_least, between, one_of, require
from linattn.lab.tasks.text.examples import Examples
from linattn.lab.tasks.text.once import once
from linattn.lab.tasks.text.order import shuffled_batch
from linattn.lab.tasks.text.task import SequenceTask
from linattn.support.options import SettingError


@dataclass(frozen=True, kw_only=True)
class LabelledTask(SequenceTask):
    """A task with labelled examples from files, which are read once and shuffled anew in each training epoch.

    Args:
        data: where the files are.
        hold_out: share of the training examples that is left out of training, for choosing options.
        evaluate: what tests use: "test", the test examples, or "valid", the examples held out.
        data_seed: seed of the choice of examples to hold out.
    """

    kind = "classification"
    pad: ClassVar[int] = 0
    data: str
    hold_out: float = 0.0
    evaluate: str = "test"
    data_seed: int = 0

    def __post_init__(self) -> None:
        between("hold_out", self.hold_out, 0, 0.9)
        one_of("evaluate", self.evaluate, ("test", "valid"))
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

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        at_least("batch_size", batch_size, 1)
        rows = self._kept[shuffled_batch(len(self._kept), batch_size, seed, step)]
        return self._train.take(rows, self.pad)

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        at_least("batch_size", batch_size, 1)
        rows = self._held if self.evaluate == "valid" else torch.arange(len(self._test))
        for some in rows.split(batch_size):
            yield self._test.take(some, self.pad)


def find_jsonl(data: str, names: tuple[str, ...]) -> Path:
    """The first of these jsonl files that a folder has, gzipped or not."""
    folder = Path(data).expanduser()
    tried = [f"{name}{end}" for name in names for end in (".jsonl", ".jsonl.gz")]
    if not folder.is_dir():
        wanted = " and ".join(f"{name}.jsonl" for name in dict.fromkeys(("train", names[0])))
        raise SettingError("data", f"must be a folder with {wanted}, got {data}")
    found = [folder / name for name in tried if (folder / name).is_file()]
    if not found:
        raise SettingError("data", f"{data} has none of {', '.join(tried)}")
    return found[0]
