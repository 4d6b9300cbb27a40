"""GLUE (arXiv:1804.07461): labelled sentences and pairs of sentences from jsonl files, and similarity (STS-B)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.tasks.text.corpus import Bytes, Pretrained
from linattn.lab.tasks.text.generated import require
from linattn.lab.tasks.text.labelled import Examples, LabelledTask, find_jsonl
from linattn.lab.tasks.text.task import Sequences, once
from linattn.support.config import option
from linattn.support.documents import as_bytes, count_jsonl, read_jsonl
from linattn.support.options import OptionError

PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"), ("question1", "question2"))
SINGLES = ("sentence", "text")
# The test files of GLUE have no labels: results are measured on the development set.
TEST_FILES = ("validation", "validation_matched", "dev", "dev_matched", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class Glue(LabelledTask):
    """Classification of sentences or of pairs of sentences.

    ``data`` is a folder with ``train.jsonl`` and a file of the same kind named validation, dev, valid or test. A line
    has a ``label``, a whole number or a name, and a ``sentence`` (or ``text``) or a pair: ``sentence1`` and
    ``sentence2``, ``premise`` and ``hypothesis``, ``question`` and ``sentence``, or ``question1`` and ``question2``.
    With two classes ``metrics`` adds ``f1`` of class 1 and ``matthews``.
    In a pair that is too long, the longer sentence is cut at its end first. A tokenizer joins pairs in its own way;
    bytes have the end of a document between sentences. Ids are those of the task ``masked-text``, to start from its
    models.
    """

    name = "glue"
    data: str = option(help="a folder with train.jsonl and validation.jsonl")
    length: int = option(128, "Most tokens of an example.", least=4)
    tokenizer: str | None = option(None, "Folder of a tokenizer of transformers.", default_text="bytes")
    labels: tuple[str, ...] | None = option(
        None, "Names in the order of the classes.", default_text="those in the training file, sorted"
    )

    def check(self) -> None:
        super().check()
        for names in (("train",), TEST_FILES):
            find_jsonl(self.data, names)
        _ = self.vocabulary  # raises now if the tokenizer cannot be read

    @once
    def _encoder(self) -> Bytes | Pretrained:
        return Bytes() if self.tokenizer is None else Pretrained(self.tokenizer)

    @property
    def vocabulary(self) -> int:
        return max(self._encoder.size, self._encoder.mask + 1)

    @once
    def label_names(self) -> tuple[str, ...]:
        if self.labels is not None:
            return self.labels
        path = find_jsonl(self.data, ("train",))
        found = [row.get("label") for row in read_jsonl(path)]
        numbers = [label for label in found if isinstance(label, int) and not isinstance(label, bool)]
        names = {label for label in found if isinstance(label, str)}
        if found and len(numbers) == len(found):
            return tuple(str(n) for n in range(max(numbers) + 1))
        if not names or any(not isinstance(label, str) for label in found):
            wrong = next((one for one in found if isinstance(one, bool) or not isinstance(one, int | str)), found[:1])
            raise OptionError(
                "data",
                f"{path}: labels must be all whole numbers or all names of classes, got {wrong!r}; labels that measure "
                "something, as in STS-B, are for the task stsb",
            )
        return tuple(sorted(names))

    @property
    def classes(self) -> int:
        return len(self.label_names)

    def train_rows(self) -> int:
        return count_jsonl(find_jsonl(self.data, ("train",)))

    def read(self, part: str) -> Examples:
        path = find_jsonl(self.data, ("train",) if part == "train" else TEST_FILES)
        numbers = {name: number for number, name in enumerate(self.label_names)}
        encoded, labels = [], []
        for row in read_jsonl(path):
            label = self._label(path, row, numbers)
            encoded.append(self._encode(*_sentences(path, row)))
            labels.append(label)
        if not encoded:
            raise OptionError("data", f"{path} has no examples")
        return Examples.of(encoded, labels, self.length)

    def _label(self, path: Path, row: Mapping[str, Any], numbers: Mapping[str, int]) -> float:
        label = row.get("label")
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(numbers):
            return label
        if not isinstance(label, str) or label not in numbers:
            raise OptionError("data", f"{path}: label must be one of {', '.join(numbers)} or its number, got {label!r}")
        return numbers[label]

    def _encode(self, first: str, second: str | None) -> Tensor:
        if isinstance(self._encoder, Pretrained):
            tokenizer = self._encoder.tokenizer
            ids = tokenizer(first, second, truncation="longest_first", max_length=self.length)["input_ids"]
            return torch.tensor(ids, dtype=torch.int32)
        a = as_bytes(first).int()
        if second is None:
            return a[: self.length]
        b, room = as_bytes(second).int(), self.length - 1
        kept = max(room - len(b), min(len(a), room - room // 2))
        return torch.cat([a[:kept], torch.tensor([Bytes.end], dtype=torch.int32), b[: room - min(kept, len(a))]])

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        sums = super().score(logits, batch)
        if self.classes != 2:
            return sums
        said, true = logits.argmax(-1) == 1, batch.targets == 1
        cells = {"true_yes": said & true, "false_yes": said & ~true, "false_no": ~said & true, "true_no": ~said & ~true}
        return sums | {name: cell.sum().double() for name, cell in cells.items()}

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        found = super().metrics(sums)
        if "true_yes" not in sums:
            return found
        tp, fp, fn, tn = (float(sums[name]) for name in ("true_yes", "false_yes", "false_no", "true_no"))
        found["f1"] = 100 * 2 * tp / max(2 * tp + fp + fn, 1)
        spread = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
        found["matthews"] = 100 * (tp * tn - fp * fn) / spread if spread else 0.0
        return found


def _sentences(path: Path, row: Mapping[str, Any]) -> tuple[str, str | None]:
    for first, second in PAIRS:
        if isinstance(row.get(first), str) and isinstance(row.get(second), str):
            return row[first], row[second]
    for name in SINGLES:
        if isinstance(row.get(name), str):
            return row[name], None
    pairs = "; ".join(" and ".join(pair) for pair in PAIRS)
    raise OptionError("data", f"{path}: a line needs {' or '.join(SINGLES)}, or {pairs}; got {', '.join(row)}")


NEAR = 0.5  # answers that are off by at most this count as right where the screen shows percent


@dataclass(frozen=True, kw_only=True)
class Similarity(Glue):
    """Regression on files as those of :class:`Glue`, but with a number as ``label``; the model has one output.

    The loss is the mean squared error. ``pearson`` is the correlation of the answers with the labels, in percent, and
    ``near`` the share of answers that are off by at most 1/2. GLUE also has Spearman's correlation, the only one that
    the code of M2, the source of the recipes, reports. It needs the ranks of all answers, which sums over batches do
    not give; do not compare ``pearson`` with it.
    """

    name = "stsb"
    metric = "pearson"
    classes = 1
    label_names = ()

    def check(self) -> None:
        super().check()
        require("labels", self.labels is None, "None, as labels are numbers here", self.labels)

    def _label(self, path: Path, row: Mapping[str, Any], numbers: Mapping[str, int]) -> float:
        label = row.get("label")
        if not isinstance(label, int | float) or isinstance(label, bool) or not isfinite(label):
            raise OptionError("data", f"{path}: label must be a finite number, got {label!r}")
        return float(label)

    def strata(self, labels: Tensor) -> Tensor:
        return (labels - labels.min()).round().long()

    def training_sums(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        said = logits.float().squeeze(-1)
        loss = F.mse_loss(said, targets, reduction="sum")
        return loss, ((said.detach() - targets).abs() <= NEAR).sum()

    def loss(self, logits: Tensor, batch: Sequences) -> Tensor:
        """Mean squared error, in fp32; gradients flow."""
        return self.training_sums(logits, batch.targets)[0] / len(batch)

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        """Sums that add up over batches, as in all tasks: moments of answers and labels."""
        squared, near = self.training_sums(logits, batch.targets)
        said, true = logits.squeeze(-1).double(), batch.targets.double()
        return {
            "total": torch.tensor(len(batch), dtype=torch.float64, device=logits.device),
            "squared": squared.double(), "near": near.double(),
            "said": said.sum(), "true": true.sum(), "said_said": said.square().sum(), "true_true": true.square().sum(),
            "said_true": (said * true).sum(),
        }  # fmt: skip

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        """``loss`` (mean squared error), ``pearson`` (0 where all answers are the same) and ``near``, in percent."""
        n = max(float(sums["total"]), 1.0)
        said, true = float(sums["said"]) / n, float(sums["true"]) / n
        spreads = float(sums["said_said"]) / n - said**2, float(sums["true_true"]) / n - true**2
        together = float(sums["said_true"]) / n - said * true
        spread = max(spreads[0] * spreads[1], 0.0) ** 0.5
        pearson = 100 * together / spread if spread > 0 else 0.0
        return {"loss": float(sums["squared"]) / n, "pearson": pearson, "near": 100 * float(sums["near"]) / n}
