"""Text and Image of the Long Range Arena (arXiv:2011.04006): film reviews as bytes, grey pictures as pixels."""

from dataclasses import dataclass
from pathlib import Path

import torch

from linattn.lab.tasks.images import ImageData
from linattn.lab.tasks.load import load_npz
from linattn.lab.tasks.text.generated import require
from linattn.lab.tasks.text.labelled import Examples, LabelledTask, find_jsonl
from linattn.lab.tasks.text.task import once
from linattn.support.config import option
from linattn.support.documents import as_bytes, count_jsonl, read_jsonl, row_text
from linattn.support.options import OptionError


@dataclass(frozen=True, kw_only=True)
class LraText(LabelledTask):
    """Is a review positive or negative, from its first ``length`` bytes? A byte b is token b + 1, and 0 is padding.

    ``data`` is a folder with ``train.jsonl`` and ``test.jsonl``, with lines ``{"text": ..., "label": 0 or 1}``.
    There may be more classes: labels are ``0 .. num_classes - 1``.
    """

    name = "lra-text"
    vocabulary = 257
    data: str = option(help="a folder with train.jsonl and test.jsonl, lines of a text and a label")
    length: int = option(4096, "Bytes that are read of a review.", least=1)
    num_classes: int = option(2, "Number of labels.", least=2)

    def check(self) -> None:
        super().check()
        for part in ("train", "test"):  # the files must exist now; they are read with the first batch
            find_jsonl(self.data, (part,))

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
                raise OptionError("data", f'{path}: every line needs a "label", {allowed}, got {label!r}')
            texts.append(as_bytes(row_text(path, row))[: self.length].short() + 1)
            labels.append(label)
        if not texts:
            raise OptionError("data", f"{path} has no examples")
        return Examples.of(texts, labels, self.length)


LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, what "convert to grey" means in imaging libraries


@dataclass(frozen=True, kw_only=True)
class LraImage(LabelledTask):
    """Classification of a picture from its grey levels 0 .. 255, row by row: 1024 tokens for CIFAR-10.

    ``data`` is an ``.npz`` file with ``x_train``, ``y_train``, ``x_test``, ``y_test``. The arena trains on nine tenths
    of the training pictures, hence the default of ``hold_out``.
    """

    name = "lra-image"
    vocabulary = 256
    data: str = option(help="an .npz file with x_train, y_train, x_test and y_test")
    hold_out: float = option(0.1, "Share of the training examples left out, for choosing options.", least=0, most=0.9)

    def check(self) -> None:
        super().check()
        path = Path(self.data).expanduser()
        wanted = "an .npz file with x_train, y_train, x_test and y_test"
        require("data", path.suffix == ".npz" and path.is_file(), wanted, self.data)

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

    def train_rows(self) -> int:
        return len(self.images.train)

    def read(self, part: str) -> Examples:
        split = self.images.train if part == "train" else self.images.test
        pictures = split.images
        if pictures.shape[1] == 3:
            # In chunks: all pictures in floating point would take gigabytes.
            weights = torch.tensor(LUMA)[:, None, None]
            grey = ((chunk.float() * weights).sum(1).round() for chunk in pictures.split(4096))
            pictures = torch.cat([chunk.to(torch.uint8) for chunk in grey])
        offsets = torch.arange(len(split) + 1) * self.length
        return Examples(pictures.flatten(), offsets, split.labels, self.length)
