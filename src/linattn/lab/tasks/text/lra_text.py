"""The task Text of the Long Range Arena (arXiv:2011.04006): film reviews as bytes."""

from dataclasses import dataclass
from types import MappingProxyType

from linattn.lab.tasks.text.checks import at_least
from linattn.lab.tasks.text.examples import Examples
from linattn.lab.tasks.text.labelled import LabelledTask, find_jsonl
from linattn.support.documents import as_bytes, count_jsonl, read_jsonl, row_text
from linattn.support.options import SettingError


@dataclass(frozen=True, kw_only=True)
class LraText(LabelledTask):
    """Is a review positive or negative, from its first ``length`` bytes? A byte b is token b + 1, and 0 is padding.

    ``data`` is a folder with ``train.jsonl`` and ``test.jsonl``, with lines ``{"text": ..., "label": 0 or 1}``.
    There may be more classes: labels are ``0 .. num_classes - 1``.
    """

    name = "lra-text"
    needs = MappingProxyType({"data": "a folder with train.jsonl and test.jsonl, lines of a text and a label"})
    length: int = 4096
    num_classes: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("length", self.length, 1)
        at_least("num_classes", self.num_classes, 2)
        for part in ("train", "test"):  # the files must exist now; they are read with the first batch
            find_jsonl(self.data, (part,))

    @property
    def vocabulary(self) -> int:
        return 257

    @property
    def classes(self) -> int:
        return self.num_classes

    def train_rows(self) -> int:
        return count_jsonl(find_jsonl(self.data, ("train",)))

    def read(self, part: str) -> Examples:
        path = find_jsonl(self.data, (part,))
        texts, labels = [], []
        for row in read_jsonl(path):
            label = row.get("label")
            if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < self.num_classes:
                allowed = f"a whole number in 0..{self.num_classes - 1}"
                raise SettingError("data", f'{path}: every line needs a "label", {allowed}, got {label!r}')
            texts.append(as_bytes(row_text(path, row))[: self.length].short() + 1)
            labels.append(label)
        if not texts:
            raise SettingError("data", f"{path} has no examples")
        return Examples.of(texts, labels, self.length)
