"""Pathfinder of the Long Range Arena (arXiv:2011.04006, 1805.08315): are two dots on one dashed curve?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.lab.tasks.text.batch import Sequences
from linattn.lab.tasks.text.checks import at_least, between, require
from linattn.lab.tasks.text.generated import GeneratedTask
from linattn.lab.tasks.text.snakes import Drawing, direction, grow, point_to_dash
from linattn.support.options import SettingError

ROUNDS = 20  # after so many in a row without a picture that has room for both curves, the settings are impossible


@dataclass(frozen=True, kw_only=True)
class Pathfinder(GeneratedTask):
    """Classification of a drawing of ``size x size`` grey levels, read row by row: 1 if a curve joins the two dots.

    Two curves of ``contour`` dashes begin ``seed_distance`` apart near the middle, with ``distractors`` short curves
    around them. One dot is at the beginning of one long curve, the other at the end of the same or of the other curve,
    with equal chance. Lengths are in pixels. Dashes that are not neighbours on a curve are at least ``separation``
    apart, which is more than ``gap``: to bridge gaps, but nothing wider, gives the answer. The defaults are the size
    and numbers of the hard version of the arena; the rule by which curves grow is simpler than in its program.
    """

    name = "pathfinder"
    kind = "classification"
    size: int = 32
    contour: int = 14
    dash: float = 2.0
    gap: float = 1.5
    separation: float = 2.0
    thickness: float = 0.5
    marker: float = 1.5
    seed_distance: float = 7.0
    continuity: float = 1.0
    distractors: int = 5
    distractor_contour: int = 4
    contrast: float = 0.75
    test_examples: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("size", self.size, 8)
        at_least("contour", self.contour, 1)
        at_least("distractors", self.distractors, 0)
        at_least("distractor_contour", self.distractor_contour, 1)
        for name in ("dash", "thickness", "marker"):  # without them there is nothing to see
            value = getattr(self, name)
            require(name, 0 < value < self.size / 2, f"above 0 and below {self.size / 2}", value)
        between("gap", self.gap, 0, self.size)
        between("continuity", self.continuity, 0, 100)  # a factor of angles
        between("contrast", self.contrast, 0.01, 1)  # ink above 1 is no grey level
        require("separation", self.separation > self.gap, f"above gap = {self.gap}", self.separation)
        high = self.size / 4
        require("seed_distance", 0 < self.seed_distance < high, f"above 0 and below {high}", self.seed_distance)

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.size**2

    @property
    def vocabulary(self) -> int:
        return 256

    @property
    def classes(self) -> int:
        return 2

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        pictures: list[Tensor] = []
        labels: list[Tensor] = []
        found = failed = 0
        while found < count and failed < ROUNDS:
            picture, label = self._attempt(generator, max(16, 4 * (count - found)))
            pictures.append(picture)
            labels.append(label)
            found += len(label)
            failed = 0 if len(label) else failed + 1
        if found >= count:
            return Sequences(torch.cat(pictures)[:count].flatten(1), torch.cat(labels)[:count])
        raise SettingError(
            "contour",
            f"two curves of {self.contour} dashes of {self.dash} found no room in {self.size} x {self.size} pixels: "
            "lower contour, dash, gap, separation or seed_distance, or raise size",
        )

    def _attempt(self, generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        """Pictures ``(found, size, size)``, of those attempts in which both curves found room, and labels."""
        drawing = Drawing(count, self.size, padding=1.0)
        margin, span = 2 * self.seed_distance, self.size - 4 * self.seed_distance
        starts = margin + span * torch.rand(count, 1, 2, generator=generator)
        law = (self.dash, self.gap, self.separation, self.continuity)
        tips = torch.zeros(count, 0, 2, 2)  # (images, curve, tip, 2)
        for _ in range(2):
            if not len(tips):
                break
            curve, laid = grow(generator, drawing, starts, self.contour, *law)
            complete = laid == self.contour
            drawing.keep(complete)
            tips = torch.cat([tips, curve[:, None]], 1)[complete]
            angle = 2 * torch.pi * torch.rand(len(tips), 8, generator=generator)
            starts = tips[:, :1, 0] + self.seed_distance * direction(angle)
        count = len(tips)
        if not count:
            return torch.zeros(0, self.size, self.size, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        for _ in range(self.distractors):
            anywhere = self.size * torch.rand(count, 16, 2, generator=generator)
            grow(generator, drawing, anywhere, self.distractor_contour, *law)
        label = torch.randint(2, (count,), generator=generator)
        which, every = torch.randint(2, (count,), generator=generator), torch.arange(count)
        dots = torch.stack([tips[every, which, 0], tips[every, (which + 1 - label) % 2, 1]], 1)
        return self.picture(drawing.dashes, drawing.there, dots), label

    def picture(self, dashes: Tensor, there: Tensor, dots: Tensor) -> Tensor:
        """``(B, size, size)`` of 0 .. 255: ink fades over one pixel at the edge of dashes and dots."""
        axis = torch.arange(self.size) + 0.5
        pixels = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
        ink = torch.zeros(len(dashes), self.size, self.size)
        for dash, is_there in zip(dashes.unbind(1), there.unbind(1), strict=True):
            near = point_to_dash(pixels, dash[:, None, None]).masked_fill(~is_there[:, None, None], torch.inf)
            ink = ink.maximum(self.contrast * (self.thickness / 2 + 0.5 - near).clamp(0, 1))
        for dot in dots.unbind(1):
            ink = ink.maximum((self.marker + 0.5 - (pixels - dot[:, None, None]).norm(dim=-1)).clamp(0, 1))
        return (255 * ink).round().long()
