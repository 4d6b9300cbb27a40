"""The task Image of the Long Range Arena (arXiv:2011.04006): a grey picture as a sequence of pixels."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from linattn.lab.tasks.images import ImageData
from linattn.lab.tasks.load import load_npz
from linattn.lab.tasks.text.examples import Examples
from linattn.lab.tasks.text.labelled import LabelledTask
from linattn.lab.tasks.text.once import once
from linattn.support.options import SettingError

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, what "convert to grey" means in imaging libraries


@dataclass(frozen=True, kw_only=True)
class LraImage(LabelledTask):
    """Classification of a picture from its grey levels 0 .. 255, row by row: 1024 tokens for CIFAR-10.

    ``data`` is an ``.npz`` file with ``x_train``, ``y_train``, ``x_test``, ``y_test``. The arena trains on nine tenths
    of the training pictures, hence the default of ``hold_out``.
    """

    name = "lra-image"
    needs = MappingProxyType({"data": "an .npz file with x_train, y_train, x_test and y_test"})
    hold_out: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        path = Path(self.data).expanduser()
        if path.suffix != ".npz" or not path.is_file():
            raise SettingError("data", f"must be {self.needs['data']}, got {self.data}")

    @once
    def images(self) -> ImageData:
        try:
            return load_npz(Path(self.data).expanduser())
        except (TypeError, ValueError) as error:
            raise SettingError("data", str(error)) from error

    @property
    def length(self) -> int:  # type: ignore[override]
        height, width = self.images.image_size
        return height * width

    @property
    def vocabulary(self) -> int:
        return 256

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
