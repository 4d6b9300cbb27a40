"""npz files, class folders, and how a source is told from another."""

import numpy as np
import pytest
import torch
from PIL import Image

from linattn.lab.tasks import ImageData, ImageFolders, load_images
from linattn.support.options import OptionError


def arrays(**other):
    random = np.random.default_rng(0)
    return {
        "x_train": random.integers(256, size=(6, 5, 4, 3), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": random.integers(256, size=(2, 5, 4, 3), dtype=np.uint8),
        "y_test": np.array([2, 0]),
    } | other


def npz(folder, **other):
    path = folder / "small.npz"
    np.savez(path, **{key: array for key, array in arrays(**other).items() if array is not None})
    return str(path)


def test_npz_channels_last_first_or_none(tmp_path):
    given = arrays()
    expected = torch.from_numpy(given["x_train"].transpose(0, 3, 1, 2).copy())
    last = load_images(npz(tmp_path))
    assert (last.name, last.classes, last.image_size, last.channels) == ("small", ("0", "1", "2"), (5, 4), 3)
    assert torch.equal(last.train.images, expected)
    assert last.test.labels.tolist() == [2, 0]
    first = {key: given[key].transpose(0, 3, 1, 2) for key in ("x_train", "x_test")}
    columns = {key: given[key][:, None] for key in ("y_train", "y_test")}
    assert torch.equal(load_images(npz(tmp_path, **first, **columns)).train.images, expected)
    grey = {key: given[key][..., 0] for key in ("x_train", "x_test")}
    assert torch.equal(load_images(npz(tmp_path, **grey)).train.images, expected[:, :1])


WRONG_NPZ = {
    "missing": ({"y_test": None}, ValueError, "lacks y_test: expected x_train, y_train, x_test, y_test, found x_train"),
    "float": ({"x_test": np.zeros((2, 5, 4, 3))}, TypeError, "x_test must be uint8 with pixels 0..255, got float64"),
    "flat": ({"x_train": np.zeros((6, 60), np.uint8)}, ValueError, "fits none"),
    "ambiguous": ({"x_train": np.zeros((6, 3, 5, 3), np.uint8)}, ValueError, "fits two of them"),
    "channels": ({"x_train": np.zeros((6, 5, 5, 2), np.uint8)}, ValueError, "fits none"),
    "count": ({"y_train": np.zeros(5, int)}, ValueError, r"y_train must be \(6,\) or \(6, 1\)"),
    "one hot": ({"y_train": np.zeros((6, 3), int)}, ValueError, r"y_train must be \(6,\)"),
    "float labels": ({"y_train": np.zeros(6)}, TypeError, "whole numbers"),
    "negative": ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, ValueError, "train labels must lie in 0..2"),
    "unknown label": ({"y_test": np.array([0, 3])}, ValueError, "test labels must lie in 0..2"),
}


@pytest.mark.parametrize("case", WRONG_NPZ)
def test_wrong_npz_files_are_named_with_what_is_expected(tmp_path, case):
    other, error, message = WRONG_NPZ[case]
    with pytest.raises(error, match=message):
        load_images(npz(tmp_path, **other))


def test_damaged_npz_files_are_named(tmp_path):
    path = tmp_path / "small.npz"
    npz(tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="no archive, or a damaged one"):
        load_images(str(path))
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match="no archive, or a damaged one"):
        load_images(str(path))


@pytest.fixture
def folders(tmp_path):
    """Two classes, red and blue, in pictures of several sizes and modes."""
    for part, count in (("train", 3), ("val", 2)):
        for name, color in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            folder = tmp_path / "flags" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                picture = Image.new("RGB", (12 + 4 * i, 10), color)
                (picture.convert("P") if i == 1 else picture).save(folder / f"{i}.png")
    return tmp_path / "flags"


def test_class_folders_in_memory(folders):
    data = load_images(str(folders), image_size=6)
    assert isinstance(data, ImageData)
    assert (data.name, data.classes, data.image_size) == ("flags", ("blue", "red"), (6, 6))
    assert (len(data.train), len(data.test)) == (6, 4)
    for part in (data.train, data.test):
        colors = torch.tensor([[0, 0, 255], [255, 0, 0]], dtype=torch.uint8)[part.labels]
        assert torch.equal(part.images, colors[:, :, None, None].expand_as(part.images))


def test_class_folders_keep_the_middle_and_the_proportions(folders):
    picture = Image.new("L", (30, 10), 0)
    picture.paste(200, (10, 0, 20, 10))  # the middle square is 200, its sides are 0
    picture.save(folders / "train" / "red" / "middle.png")
    data = load_images(str(folders), image_size=10)
    (image,) = [i for i in data.train.images[data.train.labels == 1] if i[1, 0, 5] != 0]
    assert (image == 200).all()


def test_class_folders_on_the_disk(folders):
    data = load_images(str(folders), image_size=6, resident=False)
    assert data == ImageFolders("flags", folders / "train", folders / "val", ("blue", "red"), (6, 6))
    assert (data.num_classes, data.channels) == (2, 3)


def test_wrong_class_folders_are_named(folders):
    with pytest.raises(OptionError, match="image_size: needed"):
        load_images(str(folders))
    (folders / "train" / "blue" / "0.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"0\.png cannot be read as a picture"):
        load_images(str(folders), image_size=6)
    (folders / "val" / "blue").rename(folders / "val" / "green")
    with pytest.raises(ValueError, match="only in one: blue, green"):
        load_images(str(folders), image_size=6)
    for picture in (folders / "val" / "green").iterdir():
        picture.unlink()
    with pytest.raises(FileNotFoundError, match="one folder of pictures for each class"):
        load_images(str(folders), image_size=6)


def test_a_source_that_is_nothing_known_says_what_was_looked_for(tmp_path):
    with pytest.raises(OptionError, match=r"does not exist\. Looked for \"digits\"; a folder of idx files"):
        load_images(str(tmp_path / "nothing"))
    with pytest.raises(OptionError, match="is there, but not one of these"):
        load_images(str(tmp_path))
    with pytest.raises(OptionError, match="resident: only class folders"):
        load_images("digits", resident=False)
    with pytest.raises(OptionError, match="digits has 8x8"):
        load_images("digits", image_size=16)
    assert load_images("digits", image_size=8, resident=True).image_size == (8, 8)
