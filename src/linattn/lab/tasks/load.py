"""Loads labelled images: scikit-learn's digits, idx files (MNIST), .npz files (CIFAR-10), folders of pictures."""

import gzip
import struct
import zlib
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from linattn.lab.tasks.images import ImageData, ImageFolders, ImageSplit, stratified, without
from linattn.support.extras import need
from linattn.support.options import OptionError

SOURCES = (
    '"digits"; a folder of idx files (train-images-idx3-ubyte[.gz], ...); an .npz file (x_train, y_train, x_test, '
    "y_test); a folder with train/ and test/ (or val/), one folder of pictures for each class in both"
)
RESIDENT_BELOW = 20_000  # images; at 224x224 that many take 3 GB
TEST_IMAGES = 360  # of the digits
SPLIT_SEED = 0  # part of the data set: another seed would be another test set, and figures could not be compared
KEYS = ("x_train", "y_train", "x_test", "y_test")


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
    if source == "digits":
        data = load_digits()
    elif find_idx_file(path, "train-images-idx3-ubyte") is not None:
        data = load_idx(path)
    elif path.is_file() and path.suffix == ".npz":
        data = load_npz(path)
    elif find_splits(path):
        return load_folder(path, image_size, resident)
    else:
        what = "is there, but not one of these" if path.exists() else "does not exist"
        raise OptionError("data", f"{source} {what}. Looked for {SOURCES}")
    if resident is False:
        raise OptionError("resident", f"only class folders can be left on the disk, not {source}")
    if image_size is not None and data.image_size != (image_size, image_size):
        height, width = data.image_size
        raise OptionError("image_size", f"only class folders are resized; {source} has {height}x{width}, leave it out")
    return data


def load_digits() -> ImageData:
    """Load 1,797 handwritten digits of 8x8 grey pixels: 1,437 to train and 360 to test, a stratified split by seed 0.

    Pixels 0..16 are stretched to 0..255.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits (UCI), as packed in scikit-learn.
    """
    need("the digits", "sklearn")
    import numpy

    # To import scikit-learn takes every process seconds, and its file of digits is all that is needed.
    (package,) = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    raw = torch.from_numpy(numpy.loadtxt(Path(package) / "datasets/data/digits.csv.gz", delimiter=","))
    images = (raw[:, :-1].unflatten(1, (8, 8)) * (255 / 16)).round().to(torch.uint8)[:, None]
    everything = ImageSplit(images, raw[:, -1].to(torch.int64))
    test = stratified(everything.labels, TEST_IMAGES, SPLIT_SEED)
    train = without(len(everything), test)
    return ImageData("digits", everything.take(train), everything.take(test), tuple("0123456789"))


def load_npz(path: Path) -> ImageData:
    """Load ``x_train``, ``x_test``: uint8 ``(N, H, W)``, ``(N, H, W, C)`` or ``(N, C, H, W)``, C = 1 or 3; and
    ``y_train``, ``y_test``: whole numbers ``(N,)`` or ``(N, 1)``."""
    import numpy

    if not is_zipfile(path):  # numpy would take it for a single array, or for a pickle
        raise ValueError(f"{path} is no archive, or a damaged one; expected an .npz file with {', '.join(KEYS)}")
    with numpy.load(path, allow_pickle=False) as archive:
        missing = [key for key in KEYS if key not in archive.files]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}: it has {', '.join(archive.files)}")
        arrays = {key: archive[key] for key in KEYS}
    train, test = (_npz_split(path, part, arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test"))
    return ImageData(path.stem, train, test, train.names())


def _npz_split(path: Path, part: str, x: Any, y: Any) -> ImageSplit:
    shape = x.shape if x.ndim == 4 else (*x.shape, 1)
    last, second = (len(shape) == 4 and shape[dim] in (1, 3) for dim in (3, 1))
    if x.dtype != "uint8" or (last == second and x.ndim != 3):
        layouts = "(N, H, W), (N, H, W, C) or (N, C, H, W) with C = 1 or 3, one of them only"
        raise ValueError(f"{path}: x_{part} must be uint8 of {layouts}, got {x.dtype} of {x.shape}")
    if y.dtype.kind not in "iu" or y.shape not in ((len(x),), (len(x), 1)):
        allowed = f"whole numbers ({len(x)},) or ({len(x)}, 1), one for each image"
        raise ValueError(f"{path}: y_{part} must be {allowed}, got {y.dtype} of {y.shape}")
    images = torch.from_numpy(x.reshape(shape))
    if last:
        images = images.permute(0, 3, 1, 2).contiguous()
    return ImageSplit(images, torch.from_numpy(y.reshape(-1).astype("int64")))


def find_idx_file(folder: Path, name: str) -> Path | None:
    """The file of this name, plain rather than ``.gz``. Some copies have a dot in place of the second dash."""
    spellings = (f"{spelling}{end}" for end in ("", ".gz") for spelling in (name, name.replace("-idx", ".idx")))
    return next((folder / spelling for spelling in spellings if (folder / spelling).is_file()), None)


def load_idx(folder: Path) -> ImageData:
    """Load the four files of ``folder``, named as in MNIST and Fashion-MNIST, each plain or ``.gz``."""
    splits = []
    for part in ("train", "t10k"):
        images, labels = (read_idx(folder, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        if len(images) != len(labels):
            raise ValueError(f"{folder} holds {len(images)} images, but {len(labels)} labels in {part}-...")
        splits.append(ImageSplit(images[:, None], labels.to(torch.int64)))
    train, test = splits
    return ImageData(folder.resolve().name, train, test, train.names())


def read_idx(folder: Path, name: str) -> Tensor:
    """Read the uint8 tensor of an idx file ``...-idxN-ubyte[.gz]``, of N dimensions.

    The header is two zero bytes, the type (8 = unsigned byte), the number of dimensions, and each dimension as a
    big-endian 32-bit number. The values follow, with the last dimension varying fastest.
    """
    path, ndim = find_idx_file(folder, name), int(name[-7])
    if path is None:
        raise FileNotFoundError(f"{folder} lacks {name}[.gz]")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is a damaged gzip file: {error}") from error
    start, magic = 4 + 4 * ndim, bytes((0, 0, 8, ndim))
    if content[:4] != magic or len(content) < start:
        raise ValueError(
            f"{path} is no idx file of unsigned bytes with {ndim} dimension(s): no header {magic.hex(' ')}"
        )
    shape, held = struct.unpack_from(f">{ndim}I", content, 4), len(content) - start
    if held != prod(shape) or not held:
        said = "x".join(map(str, shape))
        raise ValueError(f"{path} is damaged or empty: its header says {said} bytes, it holds {held}")
    # A bytearray is writable, as tensors must be.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape)


def find_splits(folder: Path) -> tuple[Path, Path] | None:
    """The folders of the training and the test images, ``train`` and ``test`` or ``val``; None if they are missing."""
    tests = [folder / name for name in ("test", "val") if (folder / name).is_dir()]
    return (folder / "train", tests[0]) if tests and (folder / "train").is_dir() else None


def load_folder(folder: Path, image_size: int | None, resident: bool | None) -> ImageData | ImageFolders:
    """Load ``folder/train/<class>/<picture>``, and the same in ``folder/test`` or ``folder/val``, in color.

    ``resident``: True decodes all pictures into memory: the shorter side resized to ``image_size``, then the middle
    square. False leaves them on the disk. None: in memory if there are fewer than 20,000.
    """
    need("image folders", "torchvision")
    from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

    splits = find_splits(folder)
    assert splits is not None
    if image_size is None or image_size < 1:
        raise OptionError("image_size", f"needed for pictures, which may differ in size: at least 1, got {image_size}")
    try:
        train, test = (ImageFolder(str(split)) for split in splits)
    except FileNotFoundError as error:  # no class folder, or one without pictures
        raise FileNotFoundError(f"{folder} must hold one folder of pictures for each class: {error}") from error
    if train.classes != test.classes:
        differ = sorted(set(train.classes) ^ set(test.classes))
        raise ValueError(f"{splits[0]} and {splits[1]} must hold the same classes; only in one: {', '.join(differ)}")
    name, classes = folder.resolve().name, tuple(train.classes)
    resident = len(train) + len(test) < RESIDENT_BELOW if resident is None else resident
    if not resident:
        return ImageFolders(name, *splits, classes, (image_size, image_size))
    return ImageData(name, _decode(train, image_size), _decode(test, image_size), classes)


def _decode(pictures: Any, size: int) -> ImageSplit:
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    square = v2.Compose([v2.Resize(size, v2.InterpolationMode.BICUBIC), v2.CenterCrop(size), v2.PILToTensor()])
    images = torch.empty(len(pictures), 3, size, size, dtype=torch.uint8)
    for i, (path, _) in enumerate(pictures.samples):
        try:
            images[i] = square(pictures.loader(path))
        except OSError as error:  # what PIL raises for a file that is no picture
            raise ValueError(f"{path} cannot be read as a picture: {error}") from error
    return ImageSplit(images, torch.tensor(pictures.targets, dtype=torch.int64))
