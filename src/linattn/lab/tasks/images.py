"""Labelled images: in memory, or in folders that are read while training."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from linattn.lab.tasks.stratify import stratified, without
from linattn.support.options import OptionError


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """``images (N, C, H, W)`` uint8 and ``labels (N,)`` int64."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.labels.dtype != torch.int64:
            kinds = f"{self.images.dtype} and {self.labels.dtype}"
            raise TypeError(f"images must be uint8 and labels int64, got {kinds}")
        if self.images.ndim != 4 or self.labels.shape != self.images.shape[:1] or not len(self.labels):
            shapes = f"{tuple(self.images.shape)} and {tuple(self.labels.shape)}"
            raise ValueError(f"images must be (N, C, H, W) and labels (N,) with N >= 1, got {shapes}")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> "ImageSplit":
        return ImageSplit(self.images[indices], self.labels[indices])


@dataclass(frozen=True, eq=False)
class ImageData:
    """A data set in memory. ``classes[label]`` is the name of a class.

    Example:
        >>> from linattn.lab.tasks import load_images
        >>> data = load_images("digits")
        >>> len(data.train), len(data.test), data.num_classes, data.channels, data.image_size
        (1437, 360, 10, 1, (8, 8))
    """

    name: str
    train: ImageSplit
    test: ImageSplit
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            shapes = f"{tuple(self.train.images.shape[1:])} and {tuple(self.test.images.shape[1:])}"
            raise ValueError(f"{self.name}: train and test images must have one shape (C, H, W), got {shapes}")
        for part, split in (("train", self.train), ("test", self.test)):
            low, high = (int(n) for n in split.labels.aminmax())
            if low < 0 or high >= self.num_classes:
                raise ValueError(
                    f"{self.name}: {part} labels must lie in 0..{self.num_classes - 1} ({self.num_classes} classes), "
                    f"got {low}..{high}"
                )

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def image_size(self) -> tuple[int, int]:
        return self.train.images.shape[2], self.train.images.shape[3]

    def mean_std(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of the training images, pixels in [0, 1]: two ``(C,)``, fp64."""
        value = torch.arange(256, dtype=torch.float64) / 255
        # Pixels are whole numbers: counting them is exact, and needs no copy of the images in floating point.
        counts = [channel.flatten().bincount(minlength=256) for channel in self.train.images.unbind(1)]
        share = torch.stack(counts).cpu().double() / (self.train.images.numel() // self.channels)
        mean = share @ value
        return mean, (share * (value - mean[:, None]).square()).sum(1).sqrt()

    def hold_out(self, share: float, seed: int) -> "ImageData":
        """For choosing options: a data set whose test images are a stratified ``share`` of the training images.

        The real test images are not in the result, so nothing chosen with it can have seen them.
        """
        count = round(share * len(self.train))
        if not 0 < count < len(self.train):
            raise OptionError("share", f"must leave images on both sides of {len(self.train)}, got {share}")
        held = stratified(self.train.labels, count, seed)
        rest = without(len(self.train), held)
        return replace(self, train=self.train.take(rest), test=self.train.take(held))

    def subset(self, train: int | None = None, test: int | None = None, seed: int = 0) -> "ImageData":
        """A data set with fewer images, for quick runs: ``train`` and ``test`` of them, stratified; None keeps all."""
        return replace(self, train=_part("train", self.train, train, seed), test=_part("test", self.test, test, seed))


def _part(option: str, split: ImageSplit, count: int | None, seed: int) -> ImageSplit:
    if count is None:
        return split
    if not 1 <= count <= len(split):
        raise OptionError(option, f"must be between 1 and {len(split)}, got {count}")
    return split.take(stratified(split.labels, count, seed))


@dataclass(frozen=True)
class ImageFolders:
    """A data set too big for memory: ``train_folder/<class>/<picture>``, decoded while training.

    Pictures are brought to ``image_size`` (height, width) and three channels when they are read.
    """

    name: str
    train_folder: Path
    test_folder: Path
    classes: tuple[str, ...]
    image_size: tuple[int, int]
    channels: int = 3

    @property
    def num_classes(self) -> int:
        return len(self.classes)
