"""npz files: the archive format of numpy, in which many copies of CIFAR-10 come."""

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from linattn.lab.tasks.class_names import class_names
from linattn.lab.tasks.images import ImageData, ImageSplit
from linattn.support.extras import need

KEYS = ("x_train", "y_train", "x_test", "y_test")
LAYOUTS = "(N, H, W), (N, H, W, C) or (N, C, H, W) with C = 1 or 3"


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
        ImageSplit(_images(path, f"x_{part}", arrays), _labels(path, f"y_{part}", arrays)) for part in ("train", "test")
    )
    return ImageData(path.stem, train, test, class_names(path.parent, train.labels))


def _images(path: Path, key: str, arrays: dict[str, Any]) -> Tensor:
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


def _labels(path: Path, key: str, arrays: dict[str, Any]) -> Tensor:
    array = arrays[key]
    count = len(arrays[key.replace("y_", "x_")])
    if array.dtype.kind not in "iu":
        raise TypeError(f"{path}: {key} must be whole numbers, got {array.dtype}")
    if array.shape not in ((count,), (count, 1)):
        raise ValueError(f"{path}: {key} must be ({count},) or ({count}, 1), one for each image, got {array.shape}")
    return torch.from_numpy(array.reshape(-1).astype("int64"))
