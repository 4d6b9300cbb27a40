"""idx files, written here byte by byte."""

import gzip
import struct

import pytest
import torch

from linattn.lab.tasks import load_images

SHAPE = (4, 3)


def idx(*shape, seed=0, top=256):
    values = torch.randint(top, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + bytes(
        values.flatten().tolist()
    ), values


@pytest.fixture
def files(tmp_path):
    """A folder of the four files, half of them packed, and what they hold."""
    parts = {
        "train-images-idx3-ubyte": idx(7, *SHAPE),
        "train-labels-idx1-ubyte.gz": idx(7, seed=4, top=3),
        "t10k-images-idx3-ubyte.gz": idx(2, *SHAPE, seed=1),
        "t10k-labels-idx1-ubyte": idx(2, seed=1, top=2),
    }
    folder = tmp_path / "little-mnist"
    folder.mkdir()
    for name, (content, _) in parts.items():
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder, {name: values for name, (_, values) in parts.items()}


def test_plain_and_packed_files_give_what_was_written(files):
    folder, values = files
    data = load_images(str(folder))
    assert (data.name, data.image_size, data.channels) == ("little-mnist", SHAPE, 1)
    assert data.classes == tuple(str(n) for n in range(int(values["train-labels-idx1-ubyte.gz"].max()) + 1))
    assert torch.equal(data.train.images[:, 0], values["train-images-idx3-ubyte"])
    assert torch.equal(data.train.labels, values["train-labels-idx1-ubyte.gz"].long())
    assert torch.equal(data.test.images[:, 0], values["t10k-images-idx3-ubyte.gz"])
    assert torch.equal(data.test.labels, values["t10k-labels-idx1-ubyte"].long())


def test_names_of_classes_come_from_a_file_beside(files):
    folder, _ = files
    (folder / "classes.txt").write_text("shirt\nbag\nboot\nhat\n")
    assert load_images(str(folder)).classes == ("shirt", "bag", "boot", "hat")
    (folder / "classes.txt").write_text("shirt\n")
    with pytest.raises(ValueError, match=r"classes\.txt names 1 classes, but labels go up to 2"):
        load_images(str(folder))


def test_names_with_a_dot_are_found(files):
    folder, _ = files
    (folder / "train-images-idx3-ubyte").rename(folder / "train-images.idx3-ubyte")
    assert len(load_images(str(folder)).train) == 7


PLAIN, PACKED = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz"
DAMAGE = {
    "missing": (PLAIN, lambda b: None, FileNotFoundError, r"lacks train-images-idx3-ubyte\[\.gz\]"),
    "truncated": (PLAIN, lambda b: b[:-1], ValueError, "is truncated: its header says 7x4x3 bytes, it holds 83"),
    "too long": (PLAIN, lambda b: b + b"x", ValueError, "is too long"),
    "header cut": (PLAIN, lambda b: b[:9], ValueError, "ends inside its header of 16 bytes"),
    "empty": (PLAIN, lambda b: b"", ValueError, "starts with nothing"),
    "no images": (PLAIN, lambda b: b[:4] + bytes(4) + b[8:16], ValueError, "holds no data"),
    "wrong magic": (
        PLAIN,
        lambda b: b"\x00\x00\x0d\x03" + b[4:],
        ValueError,
        "must start with 00 00 08 03, but starts",
    ),
    "labels for images": (PLAIN, lambda b: idx(7)[0], ValueError, "with 3 dimension"),
    "other count": (PLAIN, lambda b: idx(6, *SHAPE)[0], ValueError, "holds 6 images"),
    "other size": (PLAIN, lambda b: idx(7, 3, 3)[0], ValueError, "one shape"),
    "not packed": (PACKED, lambda b: b"plain", ValueError, "damaged gzip file"),
    "cut packed": (PACKED, lambda b: b[:-9], ValueError, "damaged gzip file"),
    "garbled": (PACKED, lambda b: b[:12] + bytes(x ^ 255 for x in b[12:20]) + b[20:], ValueError, "damaged gzip file"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_files_are_named_with_what_is_wrong(files, case):
    folder, _ = files
    name, damage, error, message = DAMAGE[case]
    content = damage((folder / name).read_bytes())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(error, match=message) as raised:
        load_images(str(folder))
    assert name.removesuffix(".gz") in str(raised.value) or case == "other size"
