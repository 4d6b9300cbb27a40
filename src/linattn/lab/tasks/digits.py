"""The digits that come with scikit-learn: real data without a download."""

import torch

from linattn.lab.tasks.images import ImageData, ImageSplit
from linattn.lab.tasks.stratify import stratified, without
from linattn.support.extras import need

TEST_IMAGES = 360
SPLIT_SEED = 0  # part of the data set: another seed would be another test set, and figures could not be compared


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
