"""Loads labelled images: scikit-learn's digits, idx files (MNIST), .npz files (CIFAR-10), folders of pictures."""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from linattn.lab.tasks.images import ImageData, ImageFolders, ImageSplit
from linattn.lab.tasks.stratify import stratified, without
from linattn.support.extras import need
from linattn.support.options import OptionError

SOURCES = (
    '"digits"; a folder of idx files (train-images-idx3-ubyte[.gz], ...); an .npz file (x_train, y_train, x_test, '
    "y_test); a folder with train/ and test/ (or val/), one folder of pictures for each class in both"
)
TEST_NAMES = ("test", "val")
RESIDENT_BELOW = 20_000  # images; at 224x224 that many take 3 GB
TEST_IMAGES = 360  # of the digits
SPLIT_SEED = 0  # part of the data set: another seed would be another test set, and figures could not be compared
KEYS = ("x_train", "y_train", "x_test", "y_test")
LAYOUTS = "(N, H, W), (N, H, W, C) or (N, C, H, W) with C = 1 or 3"
# Content of each file -> its usual name. Some copies have a dot in place of the second dash.
NAMES = {
    "train images": "train-images-idx3-ubyte",
    "train labels": "train-labels-idx1-ubyte",
    "test images": "t10k-images-idx3-ubyte",
    "test labels": "t10k-labels-idx1-ubyte",
}
UNSIGNED_BYTE = 0x08


def load_images(
    source: str, *, image_size: int | None = None, resident: bool | None = None
) -> ImageData | ImageFolders:
    """Load labelled images from ``source``; the kind of data is recognised by itself.

    Args:
        source: ``"digits"``, a folder of idx files (MNIST, Fashion-MNIST), an ``.npz`` file (CIFAR-10), or a folder
            with ``train/`` and ``test/`` (or ``val/``). To load a folder named digits, write ``"./digits"``.
        image_size: side of the squares that pictures in class folders are resized to; other data keep their size.
        resident: whether pictures in class folders are decoded into memory; None: if there are fewer than 20,000.

    Example:
        >>> data = load_images("digits")
        >>> data.train.images.shape, data.train.images.dtype
        (torch.Size([1437, 1, 8, 8]), torch.uint8)
    """
    path = Path(source).expanduser()
    if source != "digits" and path.is_dir() and not find_idx_files(path) and find_splits(path):
        return load_folder(path, image_size, resident)
    if resident is False:
        raise OptionError("resident", f"only class folders can be left on the disk, not {source}")
    data = _in_memory(source, path)
    if image_size is not None and data.image_size != (image_size, image_size):
        height, width = data.image_size
        raise OptionError("image_size", f"only class folders are resized; {source} has {height}x{width}, leave it out")
    return data


def _in_memory(source: str, path: Path) -> ImageData:
    if source == "digits":
        return load_digits()
    if path.is_dir() and find_idx_files(path):
        return load_idx(path)
    if path.is_file() and path.suffix == ".npz":
        return load_npz(path)
    what = "is there, but not one of these" if path.exists() else "does not exist"
    raise OptionError("data", f"{source} {what}. Looked for {SOURCES}")


def load_digits() -> ImageData:
    """Load 1,797 handwritten digits of 8x8 grey pixels: 1,437 to train and 360 to test, a stratified split by seed 0.

    Pixels 0..16 are stretched to 0..255.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits (UCI), as packed in scikit-learn.
    """
    need("the digits", "sklearn")
    from sklearn import datasets  # type: ignore[import-untyped]

    raw = datasets.load_digits()
    images = (torch.from_numpy(raw.images) * (255 / 16)).round().to(torch.uint8)[:, None]
    everything = ImageSplit(images, torch.from_numpy(raw.target).to(torch.int64))
    test = stratified(everything.labels, TEST_IMAGES, SPLIT_SEED)
    train = without(len(everything), test)
    return ImageData("digits", everything.take(train), everything.take(test), tuple("0123456789"))


def load_npz(path: Path) -> ImageData:
    """Load ``x_train``, ``x_test``: uint8 ``(N, H, W)``, ``(N, H, W, C)`` or ``(N, C, H, W)``, C = 1 or 3; and
    ``y_train``, ``y_test``: whole numbers ``(N,)`` or ``(N, 1)``."""
    need("reading .npz files", "numpy")
    import numpy

    if not is_zipfile(path):  # numpy would take it for a single array, or for a pickle
        raise ValueError(f"{path} is no archive, or a damaged one; expected an .npz file with {', '.join(KEYS)}")
    with numpy.load(path, allow_pickle=False) as archive:
        missing = [key for key in KEYS if key not in archive.files]
        if missing:
            raise ValueError(
                f"{path} lacks {', '.join(missing)}: expected {', '.join(KEYS)}, found {', '.join(archive.files)}"
            )
        arrays = {key: archive[key] for key in KEYS}
    train, test = (
        ImageSplit(_npz_images(path, f"x_{part}", arrays), _npz_labels(path, f"y_{part}", arrays))
        for part in ("train", "test")
    )
    return ImageData(path.stem, train, test, class_names(path.parent, train.labels))


def _npz_images(path: Path, key: str, arrays: dict[str, Any]) -> Tensor:
    array = arrays[key]
    if array.dtype != "uint8":
        raise TypeError(f"{path}: {key} must be uint8 with pixels 0..255, got {array.dtype}")
    images = torch.from_numpy(array)
    if images.ndim == 3:
        return images[:, None]
    last, second = (images.ndim == 4 and images.shape[dim] in (1, 3) for dim in (3, 1))
    if last == second:
        reason = "which fits two of them" if last else "which fits none"
        raise ValueError(f"{path}: {key} must be {LAYOUTS}, got {tuple(images.shape)}, {reason}")
    return images.permute(0, 3, 1, 2).contiguous() if last else images


def _npz_labels(path: Path, key: str, arrays: dict[str, Any]) -> Tensor:
    array = arrays[key]
    count = len(arrays[key.replace("y_", "x_")])
    if array.dtype.kind not in "iu":
        raise TypeError(f"{path}: {key} must be whole numbers, got {array.dtype}")
    if array.shape not in ((count,), (count, 1)):
        raise ValueError(f"{path}: {key} must be ({count},) or ({count}, 1), one for each image, got {array.shape}")
    return torch.from_numpy(array.reshape(-1).astype("int64"))


def find_idx_files(folder: Path) -> dict[str, Path]:
    """Those of the four files that are in ``folder``; plain files are preferred to ``.gz``."""
    found: dict[str, Path] = {}
    for part, name in NAMES.items():
        spellings = [name, name.replace("-idx", ".idx")]
        candidates = [folder / f"{spelling}{suffix}" for suffix in ("", ".gz") for spelling in spellings]
        there = [path for path in candidates if path.is_file()]
        if there:
            found[part] = there[0]
    return found


def load_idx(folder: Path) -> ImageData:
    """Load the four files of ``folder``, named as in MNIST and Fashion-MNIST, each plain or ``.gz``."""
    files = find_idx_files(folder)
    missing = [f"{name}[.gz]" for part, name in NAMES.items() if part not in files]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}")
    train, test = (_idx_split(files[f"{part} images"], files[f"{part} labels"]) for part in ("train", "test"))
    return ImageData(folder.resolve().name, train, test, class_names(folder, train.labels))


def read_idx(path: Path, ndim: int) -> Tensor:
    """Read the uint8 tensor of an idx file, which must have ``ndim`` dimensions.

    The header is two zero bytes, the type (8 = unsigned byte), the number of dimensions, and each dimension as a
    big-endian 32-bit number. The values follow, with the last dimension varying fastest.
    """
    content = _content(path)
    start = 4 + 4 * ndim
    magic = bytes((0, 0, UNSIGNED_BYTE, ndim))
    if content[:4] != magic:
        raise ValueError(
            f"{path} is no idx file of unsigned bytes with {ndim} dimension(s): it must start with {magic.hex(' ')}, "
            f"but starts with {content[:4].hex(' ') or 'nothing'}"
        )
    if len(content) < start:
        raise ValueError(f"{path} ends inside its header of {start} bytes: it has {len(content)}")
    shape = struct.unpack(f">{ndim}I", content[4:start])
    held = len(content) - start
    if held != prod(shape):
        what = "is truncated" if held < prod(shape) else "is too long"
        raise ValueError(f"{path} {what}: its header says {'x'.join(map(str, shape))} bytes, it holds {held}")
    if not held:
        raise ValueError(f"{path} holds no data: its header says {'x'.join(map(str, shape))}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).reshape(shape)


def _content(path: Path) -> bytearray:
    try:
        # A bytearray is writable, as tensors must be.
        return bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is a damaged gzip file: {error}") from error


def _idx_split(images: Path, labels: Path) -> ImageSplit:
    pictures, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pictures) != len(numbers):
        raise ValueError(f"{images} holds {len(pictures)} images, but {labels} {len(numbers)} labels")
    return ImageSplit(pictures[:, None], numbers.to(torch.int64))


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


def class_names(folder: Path, labels: Tensor) -> tuple[str, ...]:
    """The lines of ``classes.txt`` in ``folder``, label 0 first; without that file, the labels as numbers."""
    path = folder / "classes.txt"
    used = int(labels.max()) + 1
    if not path.is_file():
        return tuple(str(label) for label in range(used))
    names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if len(names) < used:
        raise ValueError(
            f"{path} names {len(names)} classes, but labels go up to {used - 1}: one name a line, label 0 first"
        )
    return names
