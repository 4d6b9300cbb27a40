"""Pathfinder: who floods the drawing over gaps, and no wider, knows the label."""

import pytest
import torch

from linattn.lab.tasks.text.arena import Pathfinder
from linattn.support.options import OptionError

# Four times as large as by default, so that pixels are small beside gaps.
LARGE = Pathfinder(
    size=128, contour=7, dash=8.0, gap=4.0, separation=12.0, thickness=2.0, marker=4.0, seed_distance=26.0,
    distractors=3, distractor_contour=3,
)  # fmt: skip


def flood(picture, start, reach):
    """The inked pixels that ``start`` joins, going over empty ones for less than ``reach``."""
    pixels = (picture > 90).nonzero().double()
    near = torch.cdist(pixels, pixels) < reach
    reached = torch.zeros(len(pixels), dtype=torch.bool)
    reached[(pixels - start).norm(dim=1).argmin()] = True
    while not torch.equal(more := near[reached].any(0), reached):
        reached = more
    return pixels[reached]


@pytest.fixture(scope="module")
def large():
    return LARGE.batch(0, 12)


def test_flooding_from_one_dot_reaches_the_other_if_the_label_says_so(large):
    assert 0 < large.targets.sum() < 12
    for tokens, label in zip(large.inputs, large.targets.tolist(), strict=True):
        picture = tokens.view(128, 128)
        dots = (picture == 255).nonzero().double()
        one = dots[(dots - dots[0]).norm(dim=1) < 9].mean(0)
        other = dots[(dots - dots[0]).norm(dim=1) >= 9].mean(0)
        # 6.5 is more than a gap with its rounded ends, and less than the separation.
        joined = flood(picture, one, 6.5)
        assert bool(((joined - other).norm(dim=1) < 4).any()) == bool(label)


def test_the_picture_is_the_distance_from_dashes():
    """Ink at a few pixels by hand: full inside, none a pixel away from the edge."""
    task = Pathfinder(size=16, seed_distance=3.0)
    dashes = torch.tensor([[[[2.5, 3.5], [9.5, 3.5]], [[1.0, 12.0], [4.0, 12.0]]]])
    dots = torch.tensor([[[12.5, 10.5], [3.5, 8.5]]])
    picture = task.picture(dashes, torch.tensor([[True, False]]), dots)[0]
    full = round(255 * 0.75 * 0.75)  # contrast x (thickness / 2 + 1 / 2)
    assert picture[3, 2:10].tolist() == [full] * 8
    assert picture[3, 1] == picture[2, 5] == picture[3, 10] == 0
    assert picture[12, 1:5].sum() == 0  # given up: not drawn
    assert (picture[10, 12], picture[10, 13], picture[10, 14], picture[10, 15]) == (255, 255, 0, 0)
    assert picture[9, 11] == round(255 * (2 - 2**0.5))


def test_no_room_says_so():
    with pytest.raises(ValueError, match="found no room"):
        Pathfinder(size=8, seed_distance=1.9, contour=20, distractors=0).batch(0, 1)


@pytest.mark.parametrize(
    ("setting", "value"), [("contrast", 5.0), ("dash", 16.0), ("dash", 0.0), ("gap", 33.0), ("seed_distance", 8.0)]
)
def test_settings_that_give_no_picture_are_refused(setting, value):
    with pytest.raises(OptionError, match=f"{setting}: must "):
        Pathfinder(**{setting: value, "separation": 99.0})
