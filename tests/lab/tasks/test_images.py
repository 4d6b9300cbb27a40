"""Splits, parts of them, and the digits."""

import pytest
import torch

from linattn.lab.tasks import ImageData, ImageSplit, load_images
from linattn.lab.tasks.stratify import stratified, without
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


def test_digits_have_the_promised_sizes_and_classes(digits):
    assert (digits.name, digits.classes, digits.channels, digits.image_size) == (
        "digits",
        tuple("0123456789"),
        1,
        (8, 8),
    )
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    # scikit-learn's own counts; a class's share of the test images is within one of count * 360 / 1797.
    whole = torch.tensor([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    test = digits.test.labels.bincount()
    assert torch.equal(digits.train.labels.bincount() + test, whole)
    assert (test - whole * 360 / 1797).abs().max() < 1


def test_no_digit_is_both_in_train_and_in_test(digits):
    train, test = rows(digits.train.images), rows(digits.test.images)
    assert (len(train), len(test)) == (1437, 360)
    assert not train & test


def test_digits_keep_their_pixels_and_labels(digits):
    from sklearn.datasets import load_digits

    raw = load_digits()
    known = {
        bytes((image.flatten() * 255 / 16).round().astype("uint8")): label
        for image, label in zip(raw.images, raw.target, strict=True)
    }
    for part in (digits.train, digits.test):
        assert all(known[bytes(i.flatten().tolist())] == int(n) for i, n in zip(part.images, part.labels, strict=True))
    assert digits.train.images.max() == 255


def test_digits_are_split_the_same_way_every_time(digits):
    again = load_images("digits")
    assert torch.equal(again.test.images, digits.test.images)
    assert torch.equal(again.train.labels, digits.train.labels)


@pytest.mark.parametrize("count", [0, 1, 7, 31, 59, 60])
def test_stratified_takes_exactly_and_evenly(count):
    labels = torch.tensor([0] * 10 + [1] * 20 + [2] * 30)[torch.randperm(60)]
    taken = stratified(labels, count, seed=3)
    assert len(taken.unique()) == len(taken) == count
    shares = torch.tensor([10, 20, 30]) * count / 60
    assert (labels[taken].bincount(minlength=3) - shares).abs().max() < 1
    rest = without(60, taken)
    assert torch.equal(torch.cat((taken, rest)).sort().values, torch.arange(60))


def test_stratified_does_not_prefer_the_first_classes_or_images():
    labels = torch.arange(5).repeat(20)
    chosen = torch.stack([stratified(labels, 2, seed) for seed in range(0, 800, 2)])
    counts = labels[chosen].flatten().bincount(minlength=5)
    assert counts.min() > 160 - 5 * 160**0.5 * 0.8**0.5  # five standard deviations below 800 / 5
    assert chosen.unique().numel() > 95


def test_hold_out_hides_the_test_images(digits):
    held = digits.hold_out(0.1, seed=1)
    assert (len(held.train), len(held.test)) == (1293, 144)
    assert rows(held.train.images) | rows(held.test.images) == rows(digits.train.images)
    assert not rows(held.train.images) & rows(held.test.images)
    assert (held.test.labels.bincount() - digits.train.labels.bincount() * 144 / 1437).abs().max() < 1
    assert not torch.equal(held.test.images, digits.hold_out(0.1, seed=2).test.images)
    assert torch.equal(held.test.images, digits.hold_out(0.1, seed=1).test.images)


def test_subset_is_stratified_and_within_the_parts(digits):
    few = digits.subset(train=100, seed=4)
    assert few.train.labels.bincount().tolist() == [10] * 10
    assert rows(few.train.images) <= rows(digits.train.images)
    assert few.test is digits.test
    assert len(digits.subset(test=20).test) == 20


def test_mean_and_std_are_those_of_each_channel():
    data = ImageData("x", split([0, 1, 1, 0, 1], channels=3), split([0], channels=3), ("a", "b"))
    mean, std = data.mean_std()
    pixels = data.train.images.double().transpose(0, 1).flatten(1) / 255
    torch.testing.assert_close(mean, pixels.mean(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(std, pixels.std(1, correction=0), atol=1e-12, rtol=0)


def test_wrong_data_are_named(digits):
    good = split([0, 1])
    with pytest.raises(TypeError, match="uint8"):
        ImageSplit(good.images.float(), good.labels)
    with pytest.raises(ValueError, match=r"\(N, C, H, W\)"):
        ImageSplit(good.images, good.labels[:1])
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.0"):
        ImageData("x", good, good, ("a",))
    with pytest.raises(ValueError, match="one shape"):
        ImageData("x", good, split([0], size=5), ("a", "b"))
    with pytest.raises(OptionError, match="share"):
        digits.hold_out(1.0, seed=0)
    with pytest.raises(OptionError, match="between 1 and 360"):
        digits.subset(test=361)
