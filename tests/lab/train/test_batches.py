"""Batches: which images, in which order, for which process; and that a later start gives the same."""

import pytest
import torch

from linattn.lab.tasks import ImageData, ImageSplit
from linattn.lab.train.batches import ResidentBatches, create_batches, create_mixing
from linattn.lab.train.config import TrainConfig
from linattn.support.options import OptionError
from linattn.support.seeds import seed_step

CPU = torch.device("cpu")
FULL = {
    "crop_padding": 1,
    "flip": True,
    "rand_augment": "m9-n2-mstd0.5-inc1",
    "erasing": 0.3,
    "mixup": 0.8,
    "cutmix": 1.0,
}


def numbered(train=50, test=23, channels=1):
    """Images that carry their number in their first two pixels; the rest is noise."""

    def part(count, seed):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randint(256, (count, channels, 6, 6), generator=generator, dtype=torch.uint8)
        images[:, :, 0, 0] = (torch.arange(count) // 256)[:, None]
        images[:, :, 0, 1] = (torch.arange(count) % 256)[:, None]
        return ImageSplit(images, torch.arange(count) % 5)

    return ImageData("numbered", part(train, 1), part(test, 2), tuple("abcde"))


def numbers(data, images):
    """The numbers of normalised, but otherwise untouched, images."""
    mean, std = data.mean_std()
    pixels = (images.double() * std[:, None, None] + mean[:, None, None]) * 255
    first, second = pixels[:, 0, 0, :2].round().long().unbind(1)
    return (256 * first + second).tolist()


def batches(data, **options):
    processes = {key: options.pop(key) for key in ("rank", "processes") if key in options}
    return create_batches(data, TrainConfig(**{"batch_size": 8, **options}), CPU, **processes)


def equal(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    return all(torch.equal(a, b) for pair in zip(found, expected, strict=True) for a, b in zip(*pair, strict=True))


def test_an_epoch_has_every_image_at_most_once_with_its_label():
    data = numbered()
    given = batches(data)
    epoch = list(given.train(0))
    assert len(epoch) == given.steps_per_epoch == 6
    assert all(images.shape == (8, 1, 6, 6) and images.dtype == torch.float32 for images, _ in epoch)
    seen = [n for images, _ in epoch for n in numbers(data, images)]
    assert len(set(seen)) == 48
    assert torch.cat([labels for _, labels in epoch]).tolist() == [n % 5 for n in seen]
    assert seen != sorted(seen)
    other = [n for images, _ in given.train(1) for n in numbers(data, images)]
    assert other != seen
    assert set(other) != set(seen)  # what an epoch leaves out, another has


def test_test_images_come_once_and_in_order():
    data = numbered()
    found = list(batches(data, **FULL).test())
    assert [n for images, _ in found for n in numbers(data, images)] == list(range(23))
    assert torch.cat([labels for _, labels in found]).tolist() == data.test.labels.tolist()


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_batches_of_one(processes):
    data = numbered()
    whole = [numbers(data, images) for images, _ in batches(data).train(3)]
    ranks = [batches(data, rank=rank, processes=processes) for rank in range(processes)]
    parts = [[numbers(data, images) for images, _ in rank.train(3)] for rank in ranks]
    assert [[n for part in step for n in part] for step in zip(*parts, strict=True)] == whole
    tested = [n for rank in ranks for images, _ in rank.test() for n in numbers(data, images)]
    assert sorted(tested) == list(range(23))


def test_processes_augment_differently():
    data = numbered()
    ranks = [batches(data, rank=rank, processes=2, erasing=1.0) for rank in (0, 1)]
    (first, _), (second, _) = (next(rank.train(0)) for rank in ranks)
    noise = [set(images.flatten().tolist()) for images in (first, second)]
    original = set(((data.train.images - ranks[0].augment.mean) / ranks[0].augment.std).flatten().tolist())
    assert len(noise[0] - original) > 10
    assert not (noise[0] - original) & noise[1]


@pytest.mark.parametrize("steps_per_block", [1, 4, 100])
@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_a_later_start_goes_on_exactly(options, steps_per_block, monkeypatch):
    monkeypatch.setattr("linattn.lab.train.batches.BLOCK_VALUES", steps_per_block * 8 * 36)
    data = numbered(train=83)
    whole = list(batches(data, **options).train(2))
    assert len(whole) == 10
    torch.manual_seed(5)
    for first_step in range(11):
        assert equal(batches(data, **options).train(2, first_step), whole[first_step:])


def test_what_is_drawn_outside_does_not_change_batches_nor_the_other_way_round():
    data = numbered()
    whole, drawn = [], []
    for images, targets in batches(data, **FULL).train(0):
        whole.append((images, targets))
        drawn.append(torch.rand(2).tolist())  # a model's dropout
    disturbed = []
    for step, (images, targets) in enumerate(batches(data, **FULL).train(0, 3), 3):
        disturbed.append((images, targets))
        assert torch.rand(2).tolist() == drawn[step]
        torch.rand(1000)
    assert equal(disturbed, whole[3:])
    assert len({tuple(pair) for pair in drawn}) == len(drawn)


def test_augmentation_changes_with_seed_epoch_and_block(monkeypatch):
    """All images are alike, so that their order cannot hide that they were augmented alike."""
    monkeypatch.setattr("linattn.lab.train.batches.BLOCK_VALUES", 8 * 36)
    image = ImageSplit(torch.full((16, 1, 6, 6), 7, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64))
    data = ImageData("alike", image, image, ("a",))
    runs = [batches(data, erasing=1.0, seed=seed).train(epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    found = [images for run in runs for images, _ in run]
    assert len({bytes(images.numpy()) for images in found}) == len(found) == 6


def test_small_data_are_one_batch():
    given = batches(numbered(train=5), batch_size=64)
    assert given.steps_per_epoch == 1
    assert [len(images) for images, _ in given.train(0)] == [5]


@pytest.mark.parametrize("option", ["mixup", "cutmix"])
def test_targets_have_the_weights_of_the_pixels(option):
    """Image i is i everywhere: its pixels tell what share of it and of its partner was taken."""
    mixing = create_mixing(TrainConfig(**{option: 0.8}, label_smoothing=0.1), num_classes=8, batch=8)
    weights = []
    for step in range(20):
        seed_step(0, 0, step)
        own = torch.arange(8.0)
        images, targets = mixing(own[:, None, None, None].repeat(1, 1, 10, 10), torch.arange(8))
        partner = own.flip(0)
        share = (images.mean((1, 2, 3)) - partner) / (own - partner)
        sharp = torch.diag(share) + torch.diag(1 - share).flip(1)
        torch.testing.assert_close(targets, 0.9 * sharp + 0.1 / 8, atol=1e-5, rtol=0)
        torch.testing.assert_close(targets.sum(1), torch.ones(8))
        values = images[0].unique()
        assert (values.numel() == 1) if option == "mixup" else set(values.tolist()) <= {0.0, 7.0}
        weights.append(share[0].item())
    assert max(weights) - min(weights) > 0.5


def test_mixed_batches_have_soft_targets_and_others_labels():
    data = numbered()
    _, targets = next(batches(data, mixup=0.2).train(0))
    assert targets.shape == (8, 5)
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
    assert next(batches(data).train(0))[1].dtype == torch.int64
    assert next(batches(data, mixup=0.2).test())[1].dtype == torch.int64


WRONG = {
    "crop_padding": {"crop_padding": 6},
    "rand_augment": {"rand_augment": "m9-w1"},
    "batch_size": {"batch_size": 9, "processes": 2},
    "a process's share must be even": {"batch_size": 6, "processes": 2, "mixup": 0.5},
    "epochs": {"epochs": 0},
}


@pytest.mark.parametrize("words", WRONG)
def test_options_that_do_not_fit_the_data_are_named(words):
    with pytest.raises(OptionError, match=words):
        batches(numbered(), **WRONG[words])


@pytest.mark.gpu
def test_batches_on_a_gpu_equal_those_on_the_cpu_and_never_wait(monkeypatch):
    """Noise of erasing is drawn on the device and differs; a resampled pixel may be rounded to the next level."""
    monkeypatch.setattr("linattn.lab.train.batches.BLOCK_VALUES", 16 * 3 * 36 * 5)
    data = numbered(train=200, channels=3)
    config = TrainConfig(**{**FULL, "batch_size": 16, "erasing": 0.0})
    expected = list(ResidentBatches(data, config, CPU).train(0))
    given = ResidentBatches(data, config, torch.device("cuda"))
    erasing = ResidentBatches(data, TrainConfig(**{**FULL, "batch_size": 16}), torch.device("cuda"))
    list(erasing.train(1))  # libraries start
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = list(given.train(0))
        tested = list(given.test())
        erased, later = list(erasing.train(0)), list(erasing.train(0, 7))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    level = 1.01 / (255 * data.mean_std()[1].min().item())
    for (images, targets), (cpu_images, cpu_targets) in zip(found, expected, strict=True):
        difference = (images.cpu() - cpu_images).abs()
        assert difference.max() < level
        assert (difference > level / 100).float().mean() < 0.01
        assert torch.equal(targets.cpu(), cpu_targets)
    assert torch.equal(torch.cat([labels for _, labels in tested]).cpu(), data.test.labels)
    assert equal(later, erased[7:])
