"""Classification of sequences from files: the text and image tasks of the Long Range Arena, and those of GLUE."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.tasks.images import ImageData, stratified, without
from linattn.lab.tasks.load import load_npz
from linattn.lab.tasks.text.generated import require
from linattn.lab.tasks.text.language import Bytes, Pretrained
from linattn.lab.tasks.text.task import Sequences, SequenceTask, Sums, mean, once, percent, shuffled_batch
from linattn.support.config import option
from linattn.support.documents import as_bytes, read_jsonl, row_text
from linattn.support.options import OptionError


@dataclass(frozen=True, eq=False)
class Examples:
    """N sequences end to end in ``tokens``, with number n from ``offsets[n]`` to ``offsets[n + 1]``; ``labels (N,)``.

    They are not padded: padding all to the longest would take several times the memory for most data.
    """

    tokens: Tensor
    offsets: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor, length: int) -> Sequences:
        """The batch of these rows, padded by 0 on the right to ``length``; no ``key_mask`` if nothing is padded."""
        place = self.offsets[rows, None] + torch.arange(length)
        mask = place < self.offsets[rows + 1, None]
        inputs = self.tokens[place.clamp(max=len(self.tokens) - 1)].long().masked_fill(~mask, 0)
        return Sequences(inputs, self.labels[rows], None if bool(mask.all()) else mask)


@dataclass(frozen=True, kw_only=True)
class LabelledTask(SequenceTask):
    """A task with labelled examples from files, which are read once and shuffled anew in each training epoch."""

    kind = "classification"
    data: str = option(help="files with labelled examples")
    hold_out: float = option(0.0, "Share of the training examples left out, for choosing options.", least=0, most=0.9)
    evaluate: Literal["test", "valid"] = option("test", "Test on the test examples, or on those held out.")
    data_seed: int = option(0, "Seed of the choice of examples to hold out.")

    def check(self) -> None:
        holds = self.evaluate == "test" or self.hold_out > 0
        require("hold_out", holds, "above 0 to evaluate on what is held out", self.hold_out)

    @abstractmethod
    def read(self, part: str) -> Examples:
        """Read the examples of ``part``, "train" or "test"."""

    @property
    def train_size(self) -> int:
        """Training examples of an epoch, without those held out."""
        return len(self._train[1])

    def strata(self, labels: Tensor) -> Tensor:
        """The stratum of each example, from 0 on; the same share of each stratum is held out."""
        return labels

    @once
    def _train(self) -> tuple[Examples, Tensor, Tensor]:
        """The training examples, and the indices of those to train on and of those held out."""
        found = self.read("train")
        held = stratified(self.strata(found.labels), round(self.hold_out * len(found)), self.data_seed)
        return found, without(len(found), held), held

    @once
    def _test(self) -> Examples:
        return self.read("test")

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        found, rows, _ = self._train
        return found.take(rows[shuffled_batch(len(rows), batch_size, seed, step)], self.length)

    def test_batches(self, batch_size: int) -> Iterator[Sequences]:
        found = self._train[0] if self.evaluate == "valid" else self._test
        rows = self._train[2] if self.evaluate == "valid" else torch.arange(len(found))
        return (found.take(some, self.length) for some in rows.split(batch_size))


LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, what "convert to grey" means in imaging libraries


@dataclass(frozen=True, kw_only=True)
class LraImage(LabelledTask):
    """Classification of a picture from its grey levels 0 .. 255, row by row: 1024 tokens for CIFAR-10.

    ``data`` is an ``.npz`` file with ``x_train``, ``y_train``, ``x_test``, ``y_test``. The arena (arXiv:2011.04006)
    trains on nine tenths of the training pictures, hence the default of ``hold_out``.
    """

    name = "lra-image"
    vocabulary = 256
    data: str = option(help="an .npz file with x_train, y_train, x_test and y_test")
    hold_out: float = option(0.1, "Share of the training examples left out, for choosing options.", least=0, most=0.9)

    def check(self) -> None:
        super().check()
        there = self.data.endswith(".npz") and Path(self.data).expanduser().is_file()
        require("data", there, "an .npz file with x_train, y_train, x_test and y_test", self.data)

    @once
    def images(self) -> ImageData:
        try:
            return load_npz(Path(self.data).expanduser())
        except (TypeError, ValueError) as error:
            raise OptionError("data", str(error)) from error

    @property
    def length(self) -> int:
        height, width = self.images.image_size
        return height * width

    @property
    def classes(self) -> int:
        return self.images.num_classes

    def read(self, part: str) -> Examples:
        split = getattr(self.images, part)
        pictures = split.images
        if pictures.shape[1] == 3:
            # In chunks: all pictures in floating point would take gigabytes.
            weights = torch.tensor(LUMA)[:, None, None]
            grey = [(chunk.float() * weights).sum(1).round().to(torch.uint8) for chunk in pictures.split(4096)]
            pictures = torch.cat(grey)
        return Examples(pictures.flatten(), torch.arange(len(split) + 1) * self.length, split.labels)


@dataclass(frozen=True, kw_only=True)
class LinesTask(LabelledTask):
    """Examples from the lines of ``train.jsonl`` and of the first of ``TESTS`` that the folder ``data`` has."""

    TESTS: ClassVar[tuple[str, ...]] = ("test",)

    def check(self) -> None:
        super().check()
        for part in ("train", "test"):  # the files must exist now; they are read with the first batch
            self.file(part)

    def file(self, part: str) -> Path:
        names = ("train",) if part == "train" else self.TESTS
        tried = [f"{name}{end}" for name in names for end in (".jsonl", ".jsonl.gz")]
        found = [path for name in tried if (path := Path(self.data).expanduser() / name).is_file()]
        require("data", bool(found), f"a folder with {' or '.join(tried)}", self.data)
        return found[0]

    @property
    @abstractmethod
    def label_names(self) -> tuple[str, ...]:
        """The names of the classes; a label is one of them, or its number."""

    @property
    def classes(self) -> int:
        return len(self.label_names)

    @abstractmethod
    def tokens(self, path: Path, row: Mapping[str, Any]) -> Tensor:
        """The tokens of a line."""

    def label(self, value: Any) -> float | None:
        """The number of a label, None if it is none."""
        names = self.label_names
        if isinstance(value, str):
            return names.index(value) if value in names else None
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names) else None

    def read(self, part: str) -> Examples:
        path, sequences, labels = self.file(part), [], []
        for row in read_jsonl(path):
            if (label := self.label(row.get("label"))) is None:
                allowed = f"one of {', '.join(self.label_names)} or its number" if self.label_names else "a number"
                raise OptionError("data", f"{path}: label must be {allowed}, got {row.get('label')!r}")
            sequences.append(self.tokens(path, row))
            labels.append(label)
        if not labels:
            raise OptionError("data", f"{path} has no examples")
        sizes = torch.tensor([0, *map(len, sequences)])
        return Examples(torch.cat(sequences), sizes.cumsum(0), torch.tensor(labels))


@dataclass(frozen=True, kw_only=True)
class LraText(LinesTask):
    """Is a review positive or negative, from its first ``length`` bytes? A byte b is token b + 1, and 0 is padding.

    ``data`` is a folder with ``train.jsonl`` and ``test.jsonl``, with lines ``{"text": ..., "label": 0 or 1}``.
    There may be more classes: labels are ``0 .. num_classes - 1``. From the Long Range Arena (arXiv:2011.04006).
    """

    name = "lra-text"
    vocabulary = 257
    data: str = option(help="a folder with train.jsonl and test.jsonl, lines of a text and a label")
    length: int = option(4096, "Bytes that are read of a review.", least=1)
    num_classes: int = option(2, "Number of labels.", least=2)

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.num_classes)))

    def tokens(self, path: Path, row: Mapping[str, Any]) -> Tensor:
        return as_bytes(row_text(path, dict(row)))[: self.length].short() + 1


PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"), ("question1", "question2"))
SINGLES = (("sentence",), ("text",))


@dataclass(frozen=True, kw_only=True)
class Glue(LinesTask):
    """Classification of sentences or of pairs of sentences (arXiv:1804.07461).

    ``data`` is a folder with ``train.jsonl`` and a file of the same kind named validation, dev, valid or test. A line
    has a ``label``, a whole number or a name, and a ``sentence`` (or ``text``) or a pair: ``sentence1`` and
    ``sentence2``, ``premise`` and ``hypothesis``, ``question`` and ``sentence``, or ``question1`` and ``question2``.
    With two classes ``metrics`` adds ``f1`` of class 1 and ``matthews``.
    In a pair that is too long, the longer sentence is cut at its end first. A tokenizer joins pairs in its own way;
    bytes have the end of a document between sentences. Ids are those of the task ``masked-text``, to start from its
    models.
    """

    name = "glue"
    # The test files of GLUE have no labels: results are measured on the development set.
    TESTS = ("validation", "validation_matched", "dev", "dev_matched", "valid", "test")
    data: str = option(help="a folder with train.jsonl and validation.jsonl")
    length: int = option(128, "Most tokens of an example.", least=4)
    tokenizer: str | None = option(None, "Folder of a tokenizer of transformers.", default_text="bytes")
    labels: tuple[str, ...] | None = option(
        None, "Names in the order of the classes.", default_text="those in the training file, sorted"
    )

    def check(self) -> None:
        super().check()
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
        found: list[Any] = [row.get("label") for row in read_jsonl(self.file("train"))]
        kinds = set(map(type, found))
        if kinds == {int}:
            return tuple(map(str, range(max(found) + 1)))
        if kinds == {str}:
            return tuple(sorted(set(found)))
        wrong = next((label for label in found if type(label) not in (int, str)), found[:1])
        allowed = "all whole numbers or all names of classes"
        words = f"{allowed}, got {wrong!r}; labels that measure something, as in STS-B, are for the task stsb"
        raise OptionError("data", f"{self.file('train')}: labels must be {words}")

    def tokens(self, path: Path, row: Mapping[str, Any]) -> Tensor:
        known = next((names for names in (*PAIRS, *SINGLES) if all(isinstance(row.get(n), str) for n in names)), None)
        if known is None:
            wanted = "; ".join(" and ".join(names) for names in (*SINGLES, *PAIRS))
            raise OptionError("data", f"{path}: a line needs one of {wanted}; got {', '.join(row)}")
        sentences = [row[name] for name in known]
        if isinstance(self._encoder, Pretrained):
            encode = self._encoder.tokenizer
            ids = encode(*sentences, truncation="longest_first", max_length=self.length)["input_ids"]
            return torch.tensor(ids, dtype=torch.int32)
        first, *others = (as_bytes(sentence).int() for sentence in sentences)
        if not others:
            return first[: self.length]
        second, room = others[0], self.length - 1
        kept = min(len(first), max(room - len(second), room - room // 2))
        return torch.cat([first[:kept], torch.tensor([Bytes.end], dtype=torch.int32), second[: room - kept]])

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        sums = super().score(logits, batch)
        if self.classes != 2:
            return sums
        said, true = logits.argmax(-1) == 1, batch.targets == 1
        cells = {"true_yes": said & true, "false_yes": said & ~true, "false_no": ~said & true, "true_no": ~said & ~true}
        return sums | {name: cell.sum().double() for name, cell in cells.items()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        found = super().metrics(sums)
        if "true_yes" not in sums:
            return found
        tp, fp, fn, tn = (float(sums[name]) for name in ("true_yes", "false_yes", "false_no", "true_no"))
        spread = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
        matthews = 100 * (tp * tn - fp * fn) / spread if spread else 0.0
        return found | {"f1": 100 * 2 * tp / max(2 * tp + fp + fn, 1), "matthews": matthews}


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

    def label(self, value: Any) -> float | None:
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        return float(value) if number else None

    def strata(self, labels: Tensor) -> Tensor:
        return (labels - labels.min()).round().long()

    def training_sums(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        said = logits.float().squeeze(-1)
        return F.mse_loss(said, targets, reduction="sum"), ((said.detach() - targets).abs() <= 0.5).sum()

    def loss(self, logits: Tensor, batch: Sequences) -> Tensor:
        """Mean squared error, in fp32; gradients flow."""
        return self.training_sums(logits, batch.targets)[0] / len(batch)

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        """Sums that add up over batches, as in all tasks: moments of answers and labels."""
        squared, near = self.training_sums(logits, batch.targets)
        said, true = logits.squeeze(-1).double(), batch.targets.double()
        sums = {
            "total": torch.ones_like(said), "squared": squared, "near": near, "said": said, "true": true,
            "said_said": said.square(), "true_true": true.square(), "said_true": said * true,
        }  # fmt: skip
        return {name: value.double().sum() for name, value in sums.items()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """``loss`` (mean squared error), ``pearson`` (0 where all answers are the same) and ``near``, in percent."""
        said, true = mean(sums, "said"), mean(sums, "true")
        spreads = mean(sums, "said_said") - said**2, mean(sums, "true_true") - true**2
        spread = max(spreads[0] * spreads[1], 0.0) ** 0.5
        pearson = 100 * (mean(sums, "said_true") - said * true) / spread if spread > 0 else 0.0
        return {"loss": mean(sums, "squared"), "pearson": pearson, "near": percent(sums, "near")}
