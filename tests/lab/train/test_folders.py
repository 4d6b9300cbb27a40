"""Pictures read while training."""

import pytest
import torch
from PIL import Image
from tests.lab.train.test_batches import equal

from linattn.lab.tasks import load_images
from linattn.lab.train.batches import FolderBatches, create_batches
from linattn.lab.train.config import TrainConfig
from linattn.support.options import OptionError

CPU = torch.device("cpu")
FULL = {"flip": True, "rand_augment": "m9-mstd0.5-inc1", "erasing": 0.3, "mixup": 0.8, "cutmix": 1.0}
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Picture i of a split has the color (10 i, 100, 40) in the middle half and is black around it."""
    root = tmp_path_factory.mktemp("pictures")
    for part, count in (("train", 14), ("test", 7)):
        for i in range(count):
            folder = root / part / "ab"[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            picture = Image.new("RGB", (40, 32))
            picture.paste((10 * i, 100, 40), (10, 0, 30, 32))
            picture.save(folder / f"{i:02}.png")
    return load_images(str(root), image_size=16, resident=False)


def batches(data, workers=0, rank=0, processes=1, **options):
    config = TrainConfig(**{"batch_size": 4, **options})
    return FolderBatches(data, config, CPU, rank=rank, processes=processes, workers=workers)


def numbers(images):
    """Which picture, by the red of its centre; crops keep it wherever they take some of the middle half."""
    red = images[:, 0, 8, 8] * STD[0] + MEAN[0]
    return (red * 25.5).round().long().tolist()


def test_test_pictures_come_once_in_order_and_normalised(data):
    found = list(batches(data).test())
    images, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert images.shape == (7, 3, 16, 16)
    assert numbers(images) == [0, 2, 4, 6, 1, 3, 5]  # class a, then class b
    assert labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    centre = images[:, 1:, 8, 8] * STD[1:] + MEAN[1:]
    torch.testing.assert_close(centre, (torch.tensor([100, 40]) / 255).expand(7, 2), atol=1e-3, rtol=0)


def test_an_epoch_has_fixed_shapes_and_each_picture_once(data):
    given = batches(data)
    epoch = list(given.train(0))
    assert len(epoch) == given.steps_per_epoch == 3
    assert all(images.shape == (4, 3, 16, 16) and labels.dtype == torch.int64 for images, labels in epoch)
    used = given.indices(0).flatten().tolist()
    labels = torch.cat([labels for _, labels in epoch]).tolist()
    assert len(set(used)) == 12
    assert labels == [int(i >= 7) for i in used]


def test_a_later_start_and_other_workers_give_the_same(data):
    """One with worker processes that live over epochs, one without, one that starts in the middle."""
    alone, helped = batches(data, **FULL), batches(data, workers=2, **FULL)
    for epoch in (0, 1):
        whole = list(alone.train(epoch))
        assert equal(helped.train(epoch), whole)
        torch.manual_seed(epoch)
        assert equal(batches(data, **FULL).train(epoch, 2), whole[2:])
        assert equal(helped.train(epoch, 1), whole[1:])
        assert equal(helped.train(epoch, 3), [])
    assert not torch.equal(next(alone.train(0))[0], next(alone.train(1))[0])
    assert not torch.equal(next(alone.train(0))[0], next(batches(data, seed=1, **FULL).train(0))[0])


def test_an_epoch_left_in_the_middle_does_not_leak_into_the_next(data):
    given = batches(data, workers=2)
    next(given.train(0))
    assert equal(given.train(1), batches(data).train(1))


def test_the_strongest_magnitude_can_be_trained_with(data):
    """At magnitude 10 every fifteenth operation leaves no bit of a picture; PIL refuses that, see ``_posterize``."""
    given = batches(data, rand_augment="m10-n9-p1-inc1")
    assert sum(len(images) for epoch in range(2) for images, _ in given.train(epoch)) == 24


def test_create_batches_takes_folders_and_checks_options(data):
    config = TrainConfig(batch_size=4, flip=True)
    given = create_batches(data, config, CPU)
    assert isinstance(given, FolderBatches)
    assert given.train_loader.num_workers >= 1
    with pytest.raises(OptionError, match="crop_padding"):
        create_batches(data, TrainConfig(batch_size=4, crop_padding=2), CPU)
    with pytest.raises(OptionError, match="even"):
        create_batches(data, TrainConfig(batch_size=3, mixup=0.5), CPU)
