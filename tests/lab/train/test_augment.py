"""Augmentation of batches against the same done to one image at a time, by PIL and timm."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timm_augment

from linattn.lab.train.augment import (
    GEOMETRIC,
    OPERATIONS,
    Augment,
    Policy,
    affine,
    change,
    matrices,
    parameter_of,
    rand_augment,
    random_crop,
    random_erasing,
)
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


def to_pil(image):
    return Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy())


def from_pil(picture):
    array = torch.from_numpy(np.array(picture))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def one_by_one(images, function, *parameters):
    """``function(picture, parameter ...)`` of PIL pictures, for each image with its own parameters."""
    results = [function(to_pil(image), *(p[i].item() for p in parameters)) for i, image in enumerate(images)]
    return torch.stack([from_pil(picture) for picture in results])


# timm's names of our operations, without and with `inc1`.
TIMM = {
    "auto_contrast": "AutoContrast", "equalize": "Equalize", "invert": "Invert", "rotate": "Rotate",
    "posterize": ("Posterize", "PosterizeIncreasing"), "solarize": ("Solarize", "SolarizeIncreasing"),
    "solarize_add": "SolarizeAdd", "color": ("Color", "ColorIncreasing"),
    "contrast": ("Contrast", "ContrastIncreasing"),
    "brightness": ("Brightness", "BrightnessIncreasing"), "sharpness": ("Sharpness", "SharpnessIncreasing"),
    "shear_x": "ShearX", "shear_y": "ShearY", "translate_x": "TranslateXRel", "translate_y": "TranslateYRel",
}  # fmt: skip
PLAIN = ("auto_contrast", "equalize", "invert")
FACTORS = torch.tensor([0.1, 0.55, 1.0, 1.37, 1.9, 0.73], dtype=torch.float64)
PARAMETERS = {
    "posterize": torch.tensor([5, 1, 2, 3, 4, 8]),
    "solarize": torch.tensor([0, 26, 100, 128, 200, 256]),
    "solarize_add": torch.tensor([0, 11, 50, 99, 110, 128]),
} | dict.fromkeys(("color", "contrast", "brightness", "sharpness"), FACTORS)


def timm_names(operation):
    names = TIMM[operation]
    return names if isinstance(names, tuple) else (names, names)


def test_the_operations_are_those_of_timm():
    for increasing in (False, True):
        expected = timm_augment.rand_augment_choices("", increasing=increasing)
        assert sorted(timm_names(name)[increasing] for name in OPERATIONS) == sorted(expected)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", [*PLAIN, *PARAMETERS])
def test_operations_on_values_equal_pil_pixel_by_pixel(operation, channels):
    images = pictures(channels=channels, height=40)
    given = () if operation in PLAIN else (PARAMETERS[operation],)
    expected = one_by_one(images, timm_augment.NAME_TO_OP[timm_names(operation)[0]], *given)
    assert torch.equal(change(operation, images, *(given or (torch.zeros(6),))), expected)
    assert torch.equal(expected, images) == (operation == "color" and channels == 1)


def test_equalize_and_auto_contrast_of_hard_histograms_equal_pil():
    """Tiny images (no step), sparse ones, and many pixels of the greatest value (results above 255 are cut)."""
    for size in (3, 16, 17, 33):
        images = torch.randint(256, (8, 1, size, size), generator=seeded(size), dtype=torch.uint8)
        images[0, :, 1:] = 200
        images[1, :, : size // 2] = 0
        images[2] //= 128
        for name in ("equalize", "auto_contrast"):
            expected = one_by_one(images, timm_augment.NAME_TO_OP[TIMM[name]])
            assert torch.equal(change(name, images, torch.zeros(8)), expected), (name, size)


def test_posterize_to_no_bit_is_black():
    """timm asks for it at magnitude 10; PIL masked everything away in its time, and refuses now."""
    assert not change("posterize", pictures(), torch.zeros(6)).any()


MOVES = torch.tensor([-1.0, -0.4, 0.0, 0.15, 0.6, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", GEOMETRIC)
def test_resampling_equals_timm_to_one_level(operation, channels):
    images, parameter = pictures(channels=channels), MOVES * GEOMETRIC[operation]
    fill = torch.tensor([9.0, 130.0, 250.0])[:channels]
    color = tuple(int(n) for n in fill) if channels == 3 else int(fill)
    function = timm_augment.NAME_TO_OP[TIMM[operation]]
    expected = one_by_one(
        images, lambda image, p: function(image, p, resample=Image.Resampling.BILINEAR, fillcolor=color), parameter
    )
    found = affine(images, matrices(operation, parameter, *images.shape[2:]), fill)
    # PIL drops the fraction of a pixel, we round.
    assert (found.int() - expected.int()).abs().max() <= 1
    assert torch.equal(found[2], images[2])
    assert not torch.equal(found[4], images[4])


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in PLAIN])
def test_parameters_at_a_level_are_those_of_timm(operation, increasing, monkeypatch):
    level_to_argument = timm_augment.LEVEL_TO_ARG[timm_names(operation)[increasing]]
    magnitudes = [0.0, 0.4, 2.5, 3.9, 5.0, 7.5, 9.0, 9.37, 10.0]
    for negative in (False, True):
        monkeypatch.setattr(timm_augment, "_randomly_negate", lambda v, negative=negative: -v if negative else v)
        expected = [level_to_argument(m, {})[0] for m in magnitudes]
        level = torch.tensor(magnitudes, dtype=torch.float64) / 10
        found = parameter_of(operation, level, torch.full_like(level, -1.0 if negative else 1.0), increasing)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


def test_policies_are_read_as_timm_writes_them():
    assert Policy.parse("m9-n3-mstd0.5-inc1-p0.7-mmax12") == Policy(9, 3, 0.7, 0.5, 12, 1)
    assert Policy.parse("rand-m9-mstd0.5-inc1") == Policy(9, 2, 0.5, 0.5, 10, 1)
    assert Policy.parse("n1") == Policy(m=10, n=1)


@pytest.mark.parametrize("text", ["m9-w0", "", "m9.5", "m11", "n0", "p2", "inc2", "mstd"])
def test_wrong_policies_name_what_is_allowed(text):
    with pytest.raises(OptionError, match=rf"rand_augment: .*m \(magnitude, .* as in m9-n2.*, got '{text}'"):
        Policy.parse(text)


def test_levels_have_the_spread_asked_for():
    level = Policy(m=5, mstd=0.5).levels(20_000, seeded()) * 10
    # The standard error of the mean is 0.0035, that of the deviation 0.0025: five of them.
    assert abs(level.mean() - 5) < 0.018
    assert abs(level.std() - 0.5) < 0.013
    assert (Policy(m=10, mstd=3).levels(1000, seeded()) <= 1).all()
    uniform = Policy(m=8, mstd=101).levels(20_000, seeded()) * 10
    assert uniform.min() >= 0
    assert 7.9 < uniform.max() <= 8
    assert abs(uniform.mean() - 4) < 5 * 8 / (12 * 20_000) ** 0.5


def changed_by(image, policy, fill):
    """Every result that one operation of a fixed strength can have on an image."""
    level = torch.full((1,), policy.m / 10, dtype=torch.float64)
    for sign in (torch.tensor([-1.0]), torch.tensor([1.0])):
        for name in OPERATIONS:
            parameter = parameter_of(name, level, sign, policy.inc)
            if name in GEOMETRIC:
                yield name, affine(image[None], matrices(name, parameter, *image.shape[1:]), fill)[0]
            else:
                yield name, change(name, image[None], parameter.float())[0]


@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_has_one_operation_of_its_own(channels):
    """400 copies of an image, one operation each: each result is that of some operation, and all of them occur."""
    policy, fill = Policy.parse("m7-n1-p1-inc1"), torch.full((channels,), 50.0)
    image = pictures(1, channels, height=24, width=24)[0]
    results = rand_augment(image.expand(400, -1, -1, -1), policy, fill, seeded())
    known = {}
    for name, result in changed_by(image, policy, fill):
        known.setdefault(bytes(result.flatten().tolist()), set()).add(name)
    found = [known[bytes(result.flatten().tolist())] for result in results]  # KeyError: no operation made it
    assert set().union(*found) == set(OPERATIONS)
    counts = [sum(names == {name} for names in found) for name in ("invert", "rotate", "equalize")]
    assert all(8 <= count <= 50 for count in counts)  # 400 / 15 = 26.7, five standard deviations


def test_half_of_the_images_stay_without_p():
    images = pictures(1, height=24, width=24).expand(1000, -1, -1, -1)
    found = rand_augment(images, Policy.parse("m9-n1-inc1"), torch.zeros(3), seeded())
    assert 420 < (found == images).flatten(1).all(1).sum() < 580  # five standard deviations around 500
    assert torch.equal(rand_augment(images, Policy.parse("m9-n2-p0"), torch.zeros(3), seeded()), images)


def test_two_operations_are_one_after_the_other():
    images, fill, generator = pictures(30), torch.zeros(3), seeded(5)
    expected = images
    for _ in range(2):
        expected = rand_augment(expected, Policy.parse("m9-n1-p1-inc1"), fill, generator)
    assert torch.equal(rand_augment(images, Policy.parse("m9-n2-p1-inc1"), fill, seeded(5)), expected)


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
    images, mean = pictures(20), torch.tensor([0.1, 0.5, 0.9])
    augment = Augment(TrainConfig(rand_augment="m9-n2-p1-inc1"), mean, torch.ones(3))
    moved = rand_augment(images, Policy(m=9, p=1, inc=1), torch.tensor([26.0, 128.0, 230.0]), seeded(3))
    assert torch.equal(augment(images, seeded(3)), augment.normalise(moved))


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
