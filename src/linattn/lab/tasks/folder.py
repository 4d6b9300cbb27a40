"""Image folders with one folder for each class, the layout of ImageNet and of most private data."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.lab.tasks.images import ImageData, ImageFolders, ImageSplit
from linattn.support.extras import need
from linattn.support.options import OptionError

TEST_NAMES = ("test", "val")
RESIDENT_BELOW = 20_000  # images; at 224x224 that many take 3 GB


def find_splits(folder: Path) -> tuple[Path, Path] | None:
    """The folders of the training and the test images, ``train`` and ``test`` or ``val``; None if they are missing."""
    tests = [folder / name for name in TEST_NAMES if (folder / name).is_dir()]
    return (folder / "train", tests[0]) if tests and (folder / "train").is_dir() else None


def load_folder(folder: Path, image_size: int | None, resident: bool | None) -> ImageData | ImageFolders:
    """Load ``folder/train/<class>/<picture>``, and the same in ``folder/test`` or ``folder/val``, in color.

    Args:
        folder: the folder that holds ``train`` and ``test`` or ``val``.
        image_size: side of the square that pictures are resized and cropped to.
        resident: True decodes all pictures into memory: the shorter side resized to ``image_size``, then the middle
            square. False leaves them on the disk. None: in memory if there are fewer than 20,000.
    """
    need("image folders", "torchvision")
    splits = find_splits(folder)
    if splits is None:
        raise FileNotFoundError(f"{folder} lacks the folders train and test (or val)")
    if image_size is None:
        raise OptionError("image_size", f"needed for the pictures in {folder}, which may differ in size")
    if image_size < 1:
        raise OptionError("image_size", f"must be at least 1, got {image_size}")
    train, test = (_pictures(split) for split in splits)
    if train.classes != test.classes:
        differ = sorted(set(train.classes) ^ set(test.classes))
        raise ValueError(f"{splits[0]} and {splits[1]} must hold the same classes; only in one: {', '.join(differ)}")
    name, classes = folder.resolve().name, tuple(train.classes)
    resident = len(train) + len(test) < RESIDENT_BELOW if resident is None else resident
    if not resident:
        return ImageFolders(name, *splits, classes, (image_size, image_size))
    return ImageData(name, _decode(train, image_size), _decode(test, image_size), classes)


def _pictures(folder: Path) -> Any:
    from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

    try:
        return ImageFolder(str(folder))
    except FileNotFoundError as error:  # no class folder, or one without pictures
        raise FileNotFoundError(f"{folder} must hold one folder of pictures for each class: {error}") from error


def _decode(pictures: Any, size: int) -> ImageSplit:
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    square = v2.Compose([v2.Resize(size, v2.InterpolationMode.BICUBIC), v2.CenterCrop(size), v2.PILToTensor()])
    images = torch.empty(len(pictures), 3, size, size, dtype=torch.uint8)
    for i, (path, _) in enumerate(pictures.samples):
        images[i] = _read(square, pictures.loader, path)
    return ImageSplit(images, torch.tensor(pictures.targets, dtype=torch.int64))


def _read(square: Any, loader: Any, path: str) -> Tensor:
    try:
        return square(loader(path))
    except OSError as error:  # what PIL raises for a file that is no picture
        raise ValueError(f"{path} cannot be read as a picture: {error}") from error
