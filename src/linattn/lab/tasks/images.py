"""Labelled images: in memory, or in folders that are read while training; and subsets that keep shares of classes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.support.options import OptionError


def stratified(labels: Tensor, count: int, seed: int) -> Tensor:
    """``count`` indices into ``labels (N,)``, sorted, drawn so that class c gets ``count n_c / N`` of them within one.

    The images of each class are shuffled, and the r-th of a class of n is placed at ``(r + 1/2) / n``. The first
    ``count`` images by place are taken, which gives exactly ``count``, and each class its share.

    Example:
        >>> labels = torch.tensor([0] * 8 + [1] * 4)
        >>> labels[stratified(labels, 6, seed=0)].tolist()
        [0, 0, 0, 0, 1, 1]
    """
    total, labels = len(labels), labels.cpu()
    if not 0 <= count <= total:
        raise ValueError(f"count must be between 0 and the number of labels {total}, got {count}")
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    by_class, rank = _by_class(labels[shuffled])
    place = (rank.double() + 0.5) / labels.bincount()[labels[shuffled][by_class]]
    # Classes of equal size tie at every place: a second shuffle breaks ties, rather than the order of the classes.
    again = torch.randperm(total, generator=torch.Generator().manual_seed(seed + 1))
    return shuffled[by_class[again[place[again].argsort(stable=True)[:count]]]].sort().values


def across_classes(labels: Tensor, count: int, seed: int = 0) -> Tensor:
    """At most ``count`` indices into ``labels (N,)``: one of each class in random order, then a second of each, ..."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class, rank = _by_class(labels.cpu()[shuffled])
    return shuffled[rank[by_class.argsort()].argsort(stable=True)[:count]]


def _by_class(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Indices ``(N,)`` in the order of classes, and the place of each in its class."""
    order, sizes = labels.argsort(stable=True), labels.bincount()
    return order, torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[order]]


def without(total: int, indices: Tensor) -> Tensor:
    """The indices below ``total`` that are not in ``indices``, sorted."""
    kept = torch.ones(total, dtype=torch.bool)
    kept[indices] = False
    return kept.nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """``images (N, C, H, W)`` uint8 and ``labels (N,)`` int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def names(self) -> tuple[str, ...]:
        """The labels up to the largest, as names."""
        return tuple(map(str, range(int(self.labels.max()) + 1)))

    def take(self, indices: Tensor) -> "ImageSplit":
        return ImageSplit(self.images[indices], self.labels[indices])


@dataclass(frozen=True, eq=False)
class ImageData:
    """A data set in memory. ``classes[label]`` is the name of a class."""

    name: str
    train: ImageSplit
    test: ImageSplit
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        shapes = [tuple(split.images.shape[1:]) for split in (self.train, self.test)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{self.name}: train and test images must have one shape (C, H, W), got {shapes[0]} and {shapes[1]}"
            )
        for part, split in (("train", self.train), ("test", self.test)):
            low, high = (int(n) for n in split.labels.aminmax())
            if low < 0 or high >= self.num_classes:
                allowed = f"0..{self.num_classes - 1} ({self.num_classes} classes)"
                raise ValueError(f"{self.name}: {part} labels must lie in {allowed}, got {low}..{high}")

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
        return replace(self, train=self.train.take(without(len(self.train), held)), test=self.train.take(held))

    def subset(self, train: int | None = None, test: int | None = None, seed: int = 0) -> "ImageData":
        """A data set with fewer images, for quick runs: ``train`` and ``test`` of them, stratified; None keeps all."""
        parts: dict[str, Any] = {}
        for name, count in (("train", train), ("test", test)):
            split: ImageSplit = getattr(self, name)
            if count is not None and not 1 <= count <= len(split):
                raise OptionError(name, f"must be between 1 and {len(split)}, got {count}")
            parts[name] = split if count is None else split.take(stratified(split.labels, count, seed))
        return replace(self, **parts)


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
