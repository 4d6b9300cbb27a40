"""Augmentation of batches: what each operation may do to an image, how often, and from which draws."""

import pytest
import torch

from linattn.lab.train.augment import Augment, check_policy, rand_augment, random_crop, random_erasing
from linattn.lab.train.config import TrainConfig
from linattn.support.options import OptionError


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(count=6, channels=3, height=20, width=17, seed=0):
    """Images with smooth parts, noise, few values, one value and the whole range."""
    generator = seeded(seed)
    noise = torch.randint(256, (count, channels, height, width), generator=generator)
    ramp = torch.arange(height)[:, None] * 5 + torch.arange(width)
    images = torch.stack([(noise[i] * ((i + 1) % 4) // 3 + ramp * (2 - i % 3)) % 256 for i in range(count)])
    images[0] = images[0].clamp(40, 190)
    images[1:2] = images[1:2] // 64 * 20 + 30
    images[2:3] = 77
    return images.to(torch.uint8)


@pytest.mark.parametrize("text", ["m9-w0", "", "m9.5", "m11", "n0", "p2", "inc2", "mstd"])
def test_wrong_policies_name_what_is_allowed(text):
    with pytest.raises(OptionError, match=rf"rand_augment: .*m \(magnitude, .* as in m9-n2.*, got '{text}'"):
        check_policy(text)


@pytest.mark.parametrize("channels", [1, 3])
def test_half_of_the_images_stay_without_p_and_none_with_it(channels):
    images, fill = pictures(1, channels, height=24, width=24).expand(1000, -1, -1, -1), torch.zeros(channels)
    found = rand_augment(images, "m9-n1-inc1", fill, seeded())
    assert 420 < (found == images).flatten(1).all(1).sum() < 580 + 40 * (channels == 1)  # grey has no color to change
    assert torch.equal(rand_augment(images, "m9-n2-p0", fill, seeded()), images)
    inverted = rand_augment(images, "rand-m9-n1-p1", fill, seeded())
    assert 20 < (inverted == 255 - images).flatten(1).all(1).sum() < 120  # of 15 operations


def test_crops_are_windows_of_the_padded_image_and_all_occur():
    images = pictures(1, height=6, width=5).expand(600, -1, -1, -1)
    padded = torch.nn.functional.pad(images[0], (2, 2, 2, 2))
    windows = {
        bytes(padded[:, top : top + 6, left : left + 5].flatten().tolist()): (top, left)
        for top in range(5)
        for left in range(5)
    }
    places = [windows[bytes(crop.flatten().tolist())] for crop in random_crop(images, 2, seeded())]
    assert set(places) == set(windows.values())


def test_flips_mirror_half_of_the_images():
    images = pictures(1).expand(400, -1, -1, -1)
    augment = Augment(TrainConfig(flip=True), torch.zeros(3), torch.ones(3))
    flipped, plain = augment(images, seeded()), augment.normalise(images)
    mirrored = (flipped == plain.flip(-1)).flatten(1).all(1)
    assert (mirrored ^ (flipped == plain).flatten(1).all(1)).all()
    assert 150 < mirrored.sum() < 250  # five standard deviations around 200


def test_erasing_puts_noise_into_boxes_as_timm_draws_them():
    count, height, width = 4000, 32, 24
    images = torch.full((count, 1, height, width), 9.0)
    result = random_erasing(images, 0.25, seeded())
    changed = (result != 9)[:, 0]
    erased = changed.flatten(1).any(1)
    assert abs(erased.sum() - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    rows, columns = changed[erased].any(2), changed[erased].any(1)
    assert torch.equal(changed[erased], rows[:, :, None] & columns[:, None, :]), "a box"
    down, across = rows.sum(1), columns.sum(1)
    for inside, side, full in ((rows, down, height), (columns, across, width)):
        first = inside.int().argmax(1)
        assert (side < full).all()
        assert first.min() == 0
        assert (first + side).max() == full
        place = torch.arange(full) - first[:, None]
        assert torch.equal(inside, (place >= 0) & (place < side[:, None]))
    # Sides are rounded: by half a pixel each at most.
    assert ((down + 0.5) * (across + 0.5) >= 0.02 * height * width).all()
    assert ((down - 0.5) * (across - 0.5) <= height * width / 3).all()
    assert ((down + 0.5) / (across - 0.5) >= 0.3).all()
    assert ((down - 0.5) / (across + 0.5) <= 1 / 0.3).all()
    assert (down / across).min() < 0.4
    assert (down / across).max() > 2.5
    noise = result[result != 9]
    assert abs(noise.mean()) < 5 / len(noise) ** 0.5
    assert abs(noise.var() - 1) < 5 * (2 / len(noise)) ** 0.5
    assert (images == 9).all()
    assert torch.equal(random_erasing(images, 0.25, seeded()), result)


FULL = TrainConfig(crop_padding=2, flip=True, rand_augment="m9-n2-mstd0.5-inc1", erasing=0.25)


def test_what_is_moved_in_from_outside_has_the_mean_color():
    images = torch.zeros(300, 3, 20, 20, dtype=torch.uint8)
    augment = Augment(TrainConfig(rand_augment="m9-n1-p1"), torch.tensor([0.1, 0.5, 0.9]), torch.ones(3))
    found = augment(images, seeded(3)) + augment.mean
    colors = {tuple(color) for color in found.permute(0, 2, 3, 1).round().reshape(-1, 3).int().tolist()}
    assert (26, 128, 230) in colors


def test_the_pipeline_depends_on_its_generator_alone():
    images, mean, std = pictures(50), torch.full((3,), 0.5), torch.full((3,), 0.2)
    augment = Augment(FULL, mean, std)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = augment(images, seeded(7))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(augment(images, seeded(7)), first)
    assert not torch.equal(augment(images, seeded(8)), first)
    assert torch.equal(images, pictures(50))


def test_without_augmentation_images_are_normalised_alone():
    images = pictures()
    mean, std = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.2, 0.3, 0.0])
    found = Augment(TrainConfig(), mean, std)(images, seeded())
    spread = torch.tensor([0.2, 0.3, 1 / 255])
    expected = (images.double() / 255 - mean.double()[:, None, None]) / spread.double()[:, None, None]
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)  # fp32 at values up to 230
