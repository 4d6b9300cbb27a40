"""Loads image data of every kind."""

from pathlib import Path

from linattn.lab.tasks.digits import load_digits
from linattn.lab.tasks.folder import find_splits, load_folder
from linattn.lab.tasks.idx import find_idx_files, load_idx
from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.tasks.npz import load_npz
from linattn.support.options import OptionError

SOURCES = (
    '"digits"; a folder of idx files (train-images-idx3-ubyte[.gz], ...); an .npz file (x_train, y_train, x_test, '
    "y_test); a folder with train/ and test/ (or val/), one folder of pictures for each class in both"
)


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
        >>> from linattn.lab.tasks import load_images
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
