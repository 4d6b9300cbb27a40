"""idx files: the format of MNIST and Fashion-MNIST."""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from linattn.lab.tasks.class_names import class_names
from linattn.lab.tasks.images import ImageData, ImageSplit

# Content of each file -> its usual name. Some copies have a dot in place of the second dash.
NAMES = {
    "train images": "train-images-idx3-ubyte",
    "train labels": "train-labels-idx1-ubyte",
    "test images": "t10k-images-idx3-ubyte",
    "test labels": "t10k-labels-idx1-ubyte",
}
UNSIGNED_BYTE = 0x08


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
    train, test = (_split(files[f"{part} images"], files[f"{part} labels"]) for part in ("train", "test"))
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


def _split(images: Path, labels: Path) -> ImageSplit:
    pictures, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pictures) != len(numbers):
        raise ValueError(f"{images} holds {len(pictures)} images, but {labels} {len(numbers)} labels")
    return ImageSplit(pictures[:, None], numbers.to(torch.int64))
