"""Classification of sequences that are read from files."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from linattn.support.options import SettingError
from linattn.tasks.stratify import stratified, without
from linattn.tasks.text.batch import Sequences
from linattn.tasks.text.checks import at_least, between, one_of, require
from linattn.tasks.text.examples import Examples
from linattn.tasks.text.once import once
from linattn.tasks.text.order import shuffled_batch
from linattn.tasks.text.task import SequenceTask


@dataclass(frozen=True, kw_only=True)
class LabelledTask(SequenceTask):
    """Reads examples once; training takes them in an order that is shuffled anew in each epoch.

    Args:
        data: where the files are.
        hold_out: share of the training examples that is left out of training, for choosing options.
        evaluate: what tests use, "test" or "valid": the examples held out.
        data_seed: of the choice of these.
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
        """The examples of "train" or "test"."""

    def train_rows(self) -> int:
        """How many training examples the files hold; a task that can count them without reading them does."""
        return len(self._train)

    @property
    def train_size(self) -> int:
        """Without those held out."""
        rows = self.train_rows()
        return rows - round(self.hold_out * rows)

    def strata(self, labels: Tensor) -> Tensor:
        """Whole numbers from 0 on; examples are held out of each alike."""
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
    """The first of these files in a folder, packed or not."""
    folder = Path(data).expanduser()
    tried = [f"{name}{end}" for name in names for end in (".jsonl", ".jsonl.gz")]
    if not folder.is_dir():
        wanted = " and ".join(f"{name}.jsonl" for name in dict.fromkeys(("train", names[0])))
        raise SettingError("data", f"must be a folder with {wanted}, got {data}")
    found = [folder / name for name in tried if (folder / name).is_file()]
    if not found:
        raise SettingError("data", f"{data} has none of {', '.join(tried)}")
    return found[0]
