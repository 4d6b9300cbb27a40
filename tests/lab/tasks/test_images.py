"""Labelled images: how files are read, how a source is told from another, and subsets of what was read."""

import gzip
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from linattn.lab.tasks import ImageData, ImageFolders, ImageSplit, load_images
from linattn.lab.tasks.images import across_classes, stratified, without
from linattn.support.options import OptionError


def split(labels, channels=1, size=4):
    labels = torch.as_tensor(labels)
    generator = torch.Generator().manual_seed(len(labels))
    shape = (len(labels), channels, size, size)
    return ImageSplit(torch.randint(256, shape, generator=generator, dtype=torch.uint8), labels)


def rows(images):
    """Images as a set of byte strings."""
    return {bytes(image.flatten().tolist()) for image in images}


@pytest.fixture(scope="module")
def digits():
    return load_images("digits")


def test_digits_keep_their_pixels_and_labels_and_are_split_without_repeats(digits):
    from sklearn.datasets import load_digits

    assert (digits.name, digits.classes, digits.image_size) == ("digits", tuple("0123456789"), (8, 8))
    train, test = rows(digits.train.images), rows(digits.test.images)
    assert (len(train), len(test), len(train & test)) == (1437, 360, 0)
    raw = load_digits()
    known = {
        bytes((image.flatten() * 255 / 16).round().astype("uint8")): label
        for image, label in zip(raw.images, raw.target, strict=True)
    }
    for part in (digits.train, digits.test):
        assert all(known[bytes(i.flatten().tolist())] == int(n) for i, n in zip(part.images, part.labels, strict=True))
    whole = torch.tensor(raw.target).bincount()
    assert (digits.test.labels.bincount() - whole * 360 / 1797).abs().max() < 1
    assert torch.equal(load_images("digits").test.images, digits.test.images)


@pytest.mark.parametrize("count", [0, 1, 31, 60])
def test_stratified_takes_exactly_and_evenly(count):
    labels = torch.tensor([0] * 10 + [1] * 20 + [2] * 30)[torch.randperm(60)]
    taken = stratified(labels, count, seed=3)
    assert len(taken.unique()) == len(taken) == count
    shares = torch.tensor([10, 20, 30]) * count / 60
    assert (labels[taken].bincount(minlength=3) - shares).abs().max() < 1
    assert torch.equal(torch.cat((taken, without(60, taken))).sort().values, torch.arange(60))


def test_across_classes_takes_one_of_each_before_a_second():
    labels = torch.tensor([2, 0, 0, 0, 1, 0, 2, 0])
    taken = across_classes(labels, 5, seed=1)
    assert sorted(labels[taken[:3]].tolist()) == [0, 1, 2]
    assert sorted(labels[taken[3:]].tolist()) == [0, 2]
    assert len(set(taken.tolist())) == 5


def test_hold_out_hides_the_test_images_and_subset_keeps_shares(digits):
    held = digits.hold_out(0.1, seed=1)
    assert (len(held.train), len(held.test)) == (1293, 144)
    assert rows(held.train.images) | rows(held.test.images) == rows(digits.train.images)
    assert not rows(held.train.images) & rows(held.test.images)
    assert not torch.equal(held.test.images, digits.hold_out(0.1, seed=2).test.images)
    few = digits.subset(train=100, seed=4)
    assert few.train.labels.bincount().tolist() == [10] * 10
    assert rows(few.train.images) <= rows(digits.train.images)
    assert few.test is digits.test


def test_mean_and_std_are_those_of_each_channel():
    data = ImageData("x", split([0, 1, 1, 0, 1], channels=3), split([0], channels=3), ("a", "b"))
    mean, std = data.mean_std()
    pixels = data.train.images.double().transpose(0, 1).flatten(1) / 255
    torch.testing.assert_close(mean, pixels.mean(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(std, pixels.std(1, correction=0), atol=1e-12, rtol=0)


def test_wrong_data_are_named(digits):
    good = split([0, 1])
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.0"):
        ImageData("x", good, good, ("a",))
    with pytest.raises(ValueError, match="one shape"):
        ImageData("x", good, split([0], size=5), ("a", "b"))
    with pytest.raises(OptionError, match="share"):
        digits.hold_out(1.0, seed=0)
    with pytest.raises(OptionError, match="between 1 and 360"):
        digits.subset(test=361)


ARRAYS = {
    "x_train": np.random.default_rng(0).integers(256, size=(6, 5, 4, 3), dtype=np.uint8),
    "y_train": np.array([0, 1, 2, 0, 1, 2]),
    "x_test": np.random.default_rng(1).integers(256, size=(2, 5, 4, 3), dtype=np.uint8),
    "y_test": np.array([2, 0]),
}


def npz(folder, **other):
    path = folder / "small.npz"
    np.savez(path, **{key: array for key, array in (ARRAYS | other).items() if array is not None})
    return str(path)


def test_npz_channels_last_first_or_none(tmp_path):
    expected = torch.from_numpy(ARRAYS["x_train"].transpose(0, 3, 1, 2).copy())
    last = load_images(npz(tmp_path))
    assert (last.name, last.classes, last.image_size, last.channels) == ("small", ("0", "1", "2"), (5, 4), 3)
    assert torch.equal(last.train.images, expected)
    assert last.test.labels.tolist() == [2, 0]
    first = {key: ARRAYS[key].transpose(0, 3, 1, 2) for key in ("x_train", "x_test")}
    columns = {key: ARRAYS[key][:, None] for key in ("y_train", "y_test")}
    assert torch.equal(load_images(npz(tmp_path, **first, **columns)).train.images, expected)
    grey = {key: ARRAYS[key][..., 0] for key in ("x_train", "x_test")}
    assert torch.equal(load_images(npz(tmp_path, **grey)).train.images, expected[:, :1])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"y_test": None}, "lacks y_test: it has x_train"),
        ({"x_test": np.zeros((2, 5, 4, 3))}, "x_test must be uint8 of .*, got float64"),
        ({"x_train": np.zeros((6, 60), np.uint8)}, r"got uint8 of \(6, 60\)"),
        ({"x_train": np.zeros((6, 3, 5, 3), np.uint8)}, "x_train must be .* one of them only"),
        ({"x_train": np.zeros((6, 5, 5, 2), np.uint8)}, "x_train must be"),
        ({"y_train": np.zeros(5, int)}, r"y_train must be whole numbers \(6,\) or \(6, 1\)"),
        ({"y_train": np.zeros(6)}, "whole numbers"),
        ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, r"train labels must lie in 0\.\.2"),
        ({"y_test": np.array([0, 3])}, r"test labels must lie in 0\.\.2"),
    ],
)
def test_wrong_npz_files_are_named_with_what_is_expected(tmp_path, other, message):
    with pytest.raises(ValueError, match=message):
        load_images(npz(tmp_path, **other))
    with open(tmp_path / "small.npz", "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match="no archive, or a damaged one"):
        load_images(str(tmp_path / "small.npz"))


def idx(*shape, seed=0, top=256):
    values = torch.randint(top, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + bytes(values.flatten()), values


@pytest.fixture
def mnist(tmp_path):
    """A folder of the four files, half of them packed, and what they hold."""
    parts = {
        "train-images-idx3-ubyte": idx(7, 4, 3),
        "train-labels.idx1-ubyte.gz": idx(7, seed=4, top=3),  # some copies have a dot
        "t10k-images-idx3-ubyte.gz": idx(2, 4, 3, seed=1),
        "t10k-labels-idx1-ubyte": idx(2, seed=1, top=2),
    }
    folder = tmp_path / "little-mnist"
    folder.mkdir()
    for name, (content, _) in parts.items():
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder, [values for _, values in parts.values()]


def test_plain_and_packed_idx_files_give_what_was_written(mnist):
    folder, values = mnist
    data = load_images(str(folder))
    assert (data.name, data.image_size, data.channels) == ("little-mnist", (4, 3), 1)
    assert data.classes == tuple(str(n) for n in range(int(values[1].max()) + 1))
    found = [data.train.images[:, 0], data.train.labels, data.test.images[:, 0], data.test.labels]
    assert all(torch.equal(one, other.to(one)) for one, other in zip(found, values, strict=True))


PLAIN, PACKED = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (PLAIN, lambda b: b[:-1], "is damaged or empty: its header says 7x4x3 bytes, it holds 83"),
        (PLAIN, lambda b: b + b"x", "is damaged or empty"),
        (PLAIN, lambda b: b[:4] + bytes(4) + b[8:16], "is damaged or empty"),
        (PLAIN, lambda b: b[:9], "no header 00 00 08 03"),
        (PLAIN, lambda b: b"\x00\x00\x0d\x03" + b[4:], "no header 00 00 08 03"),
        (PLAIN, lambda b: idx(7)[0], r"with 3 dimension\(s\)"),
        (PLAIN, lambda b: idx(6, 4, 3)[0], "holds 6 images, but 7 labels"),
        (PLAIN, lambda b: idx(7, 3, 3)[0], "one shape"),
        (PACKED, lambda b: b"plain", "damaged gzip file"),
        (PACKED, lambda b: b[:-9], "damaged gzip file"),
        (PACKED, lambda b: b[:12] + bytes(x ^ 255 for x in b[12:20]) + b[20:], "damaged gzip file"),
    ],
)
def test_damaged_idx_files_are_named_with_what_is_wrong(mnist, name, damage, message):
    folder, _ = mnist
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    with pytest.raises(ValueError, match=message):
        load_images(str(folder))
    (folder / PACKED).unlink()
    (folder / PLAIN).write_bytes(idx(7, 4, 3)[0])
    with pytest.raises(FileNotFoundError, match=r"lacks t10k-images-idx3-ubyte\[\.gz\]"):
        load_images(str(folder))


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


def test_class_folders(folders):
    streamed = load_images(str(folders), image_size=6, resident=False)
    assert streamed == ImageFolders("flags", folders / "train", folders / "val", ("blue", "red"), (6, 6))
    data = load_images(str(folders), image_size=6)
    assert (data.name, data.classes, data.image_size) == ("flags", ("blue", "red"), (6, 6))
    assert (len(data.train), len(data.test)) == (6, 4)
    for part in (data.train, data.test):
        colors = torch.tensor([[0, 0, 255], [255, 0, 0]], dtype=torch.uint8)[part.labels]
        assert torch.equal(part.images, colors[:, :, None, None].expand_as(part.images))
    picture = Image.new("L", (30, 10), 0)
    picture.paste(200, (10, 0, 20, 10))  # the middle square is 200, its sides are 0
    picture.save(folders / "train" / "red" / "middle.png")
    data = load_images(str(folders), image_size=10)
    (image,) = [i for i in data.train.images[data.train.labels == 1] if i[1, 0, 5] != 0]
    assert (image == 200).all()


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
