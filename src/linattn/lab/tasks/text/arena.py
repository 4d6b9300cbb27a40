"""Drawn tasks of the Long Range Arena (arXiv:2011.04006): ListOps (1804.06028), the value of a nested list, and
Pathfinder (1805.08315), whether two dots are on one dashed curve."""

from dataclasses import dataclass
from itertools import pairwise
from math import pi

import torch
from torch import Tensor

from linattn.lab.tasks.text.generated import GeneratedTask, Range, distinct, require, whole
from linattn.lab.tasks.text.task import Sequences
from linattn.support.config import option
from linattn.support.options import OptionError

TOKENS = ("pad", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")


@dataclass(frozen=True, kw_only=True)
class ListOps(GeneratedTask):
    """The value of an expression, one of ten digits: ``[MAX 4 3 [MIN 2 3 ] 1 0 ]`` is 4.

    A node is an operator with chance ``branching``, else a digit; a node at depth ``depth`` (the root has depth 1) is a
    digit. The operators are smallest, largest, median (rounded down) and sum modulo 10, all equally likely; the number
    of their arguments is in the range ``arguments``. An operator takes two tokens, a digit one. Only expressions with
    more than ``shortest`` and fewer than ``length`` tokens are kept.
    """

    name = "listops"
    kind = "classification"
    vocabulary = len(TOKENS)
    classes = 10
    length: int = option(2000, "Expressions have fewer tokens.")
    shortest: int = option(500, "Expressions have more tokens.", least=0)
    depth: int = option(10, "Deepest level of a node.", least=2)
    arguments: Range = option((2, 10), "Range of the arguments of an operator.", least=1)
    branching: float = option(0.25, "Chance of an operator at a node.", least=0.01, most=1)
    test_examples: int = option(2000, "Test sequences.", least=1)

    def check(self) -> None:
        super().check()
        require("length", self.length > self.shortest + 4, f"above shortest + 4 = {self.shortest + 4}", self.length)

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        drawn: list[tuple[Tensor, Tensor]] = []
        found = 0
        while found < count:
            drawn.append(random_trees(generator, 1024, self))
            found += len(drawn[-1][1])
            if len(drawn) >= 200 and not found:
                raise OptionError(
                    "shortest",
                    f"no expression of {self.shortest} to {self.length} tokens in {1024 * len(drawn)} with depth "
                    f"{self.depth}, arguments {self.arguments} and branching {self.branching}: change these settings",
                )
        tokens, answers = (torch.cat(column)[:count] for column in zip(*drawn, strict=True))
        return Sequences(tokens, answers, tokens != 0)


@dataclass
class Level:
    """All nodes of one depth. Children of one parent are side by side, in the order of their parents."""

    tree: Tensor  # (n,) the expression each node belongs to
    operator: Tensor  # (n,) 0 .. 3, or -1 for a digit
    arity: Tensor  # (n,) number of children
    value: Tensor  # (n,) digits now, results of operators later
    size: Tensor  # (n,) tokens of the node and all nodes below


def random_trees(generator: torch.Generator, count: int, task: ListOps) -> tuple[Tensor, Tensor]:
    """Draw ``count`` expressions, keep those with ``shortest < tokens < length``: ``(kept, length)``, ``(kept,)``."""
    levels = _grow(generator, count, task)
    for upper, lower in zip(levels[-2::-1], levels[:0:-1], strict=True):
        _fold(upper, lower)
    size = levels[0].size
    kept = (size > task.shortest) & (size < task.length)
    row = torch.where(kept, kept.cumsum(0) - 1, -1)
    tokens = torch.zeros(int(kept.sum()), task.length, dtype=torch.int64)
    start = torch.zeros(count, dtype=torch.int64)
    _write(tokens, row, levels[0], start)
    for upper, lower in pairwise(levels):
        start = _starts(upper, lower, start)
        _write(tokens, row, lower, start)
    return tokens, levels[0].value[kept]


def _grow(generator: torch.Generator, count: int, task: ListOps) -> list[Level]:
    tree = torch.arange(count)
    used = torch.zeros(count, dtype=torch.int64)  # tokens so far: expressions that are too long do not grow further
    levels: list[Level] = []
    for depth in range(1, task.depth + 1):
        n = len(tree)
        is_operator = (torch.rand(n, generator=generator) < task.branching) & (depth < task.depth)
        used.scatter_add_(0, tree, 1 + is_operator.long())
        is_operator &= used[tree] < task.length
        kind = torch.randint(4, (n,), generator=generator)
        arity = whole(generator, *task.arguments, n) * is_operator
        digit = torch.randint(10, (n,), generator=generator)
        levels.append(Level(tree, torch.where(is_operator, kind, -1), arity, digit, 1 + is_operator.long()))
        tree = tree.repeat_interleave(arity)
        if not len(tree):
            break
    levels[0].size += task.length * (used >= task.length)  # a tree that was cut cannot pass for a short one
    return levels


def _fold(upper: Level, lower: Level) -> None:
    """Compute values and sizes of the operators in ``upper`` from their arguments in ``lower``."""
    parents = (upper.operator >= 0).nonzero()[:, 0]
    arity = upper.arity[parents]
    owner = torch.arange(len(parents)).repeat_interleave(arity)
    first = arity.cumsum(0) - arity
    size, total = torch.zeros(2, len(parents), dtype=torch.int64)
    size.scatter_add_(0, owner, lower.size)
    total.scatter_add_(0, owner, lower.value)
    ranked = lower.value[(owner * 10 + lower.value).argsort(stable=True)]  # arguments of one parent from low to high
    middle = ranked[first + (arity - 1) // 2] + ranked[first + arity // 2]
    results = torch.stack([ranked[first], ranked[first + arity - 1], middle // 2, total % 10])
    upper.value[parents] = results.gather(0, upper.operator[parents][None])[0]
    upper.size[parents] += size


def _starts(upper: Level, lower: Level, start: Tensor) -> Tensor:
    """Where each node of ``lower`` begins: after the opening token of its parent and the siblings before it."""
    before = lower.size.cumsum(0) - lower.size
    arity = upper.arity[upper.arity > 0]
    eldest = (arity.cumsum(0) - arity).repeat_interleave(arity)
    return start[upper.arity > 0].repeat_interleave(arity) + 1 + before - before[eldest]


def _write(tokens: Tensor, row: Tensor, level: Level, start: Tensor) -> None:
    """Write the tokens of a level: digits are 1 .. 10, operators open with 11 .. 14 and close with 15."""
    here, is_operator = row[level.tree], level.operator >= 0
    kept, opens = here >= 0, (here >= 0) & is_operator
    tokens[here[kept], start[kept]] = torch.where(is_operator, 11 + level.operator, 1 + level.value)[kept]
    tokens[here[opens], (start + level.size - 1)[opens]] = 15


ROUNDS = 20  # after so many in a row without a picture that has room for both curves, the settings are impossible
HEADINGS = 16  # directions tried for each next dash
PADDING = 1.0  # pixels between dashes and the edge


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
    vocabulary = 256
    classes = 2
    size: int = option(32, "Pixels of a side.", least=8)
    contour: int = option(14, "Dashes of a long curve.", least=1)
    dash: float = option(2.0, "Length of a dash.", above=0)
    gap: float = option(1.5, "Between two dashes of a curve.", least=0)
    separation: float = option(2.0, "Least distance of dashes that are not neighbours.")
    thickness: float = option(0.5, "Of a dash.", above=0)
    marker: float = option(1.5, "Radius of a dot.", above=0)
    seed_distance: float = option(7.0, "Between the beginnings of the two long curves.", above=0)
    continuity: float = option(1.0, "How straight curves are: a factor of angles.", least=0, most=100)
    distractors: int = option(5, "Short curves.", least=0)
    distractor_contour: int = option(4, "Dashes of a short curve.", least=1)
    contrast: float = option(0.75, "Ink of dashes; more than 1 is no grey level.", least=0.01, most=1)
    test_examples: int = option(2000, "Test sequences.", least=1)

    def check(self) -> None:
        for name in ("dash", "thickness", "marker"):
            require(name, getattr(self, name) < self.size / 2, f"below {self.size / 2}", getattr(self, name))
        require("gap", self.gap <= self.size, f"at most {self.size}", self.gap)
        require("separation", self.separation > self.gap, f"above gap = {self.gap}", self.separation)
        high = self.size / 4
        require("seed_distance", self.seed_distance < high, f"below {high}", self.seed_distance)

    @property
    def length(self) -> int:
        return self.size**2

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        drawn: list[tuple[Tensor, Tensor]] = []
        found = failed = 0
        while found < count:
            drawn.append(self._attempt(generator, max(16, 4 * (count - found))))
            found += len(drawn[-1][1])
            failed = 0 if len(drawn[-1][1]) else failed + 1
            if failed == ROUNDS:
                raise OptionError(
                    "contour",
                    f"two curves of {self.contour} dashes of {self.dash} found no room in {self.size} x {self.size} "
                    "pixels: lower contour, dash, gap, separation or seed_distance, or raise size",
                )
        pictures, labels = (torch.cat(column)[:count] for column in zip(*drawn, strict=True))
        return Sequences(pictures.flatten(1), labels)

    def _attempt(self, generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        """Pictures ``(found, size, size)``, of those attempts in which both curves found room, and labels."""
        drawing = Drawing(count, self)
        margin, span = 2 * self.seed_distance, self.size - 4 * self.seed_distance
        starts = margin + span * torch.rand(count, 1, 2, generator=generator)
        tips = torch.zeros(count, 0, 2, 2)  # (images, curve, tip, 2)
        for _ in range(2):
            curve, complete = drawing.grow(generator, starts, self.contour)
            drawing.dashes, drawing.there = drawing.dashes[complete], drawing.there[complete]
            tips = torch.cat([tips, curve[:, None]], 1)[complete]
            if not len(tips):
                return torch.zeros(0, self.size, self.size, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
            angle = 2 * torch.pi * torch.rand(len(tips), 8, generator=generator)
            starts = tips[:, :1, 0] + self.seed_distance * direction(angle)
        count = len(tips)
        for _ in range(self.distractors):
            anywhere = self.size * torch.rand(count, 16, 2, generator=generator)
            drawing.grow(generator, anywhere, self.distractor_contour)
        label, which = (torch.randint(2, (count,), generator=generator) for _ in range(2))
        every = torch.arange(count)
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


class Drawing:
    """Dashes ``(B, S, 2 ends, 2 coordinates)`` drawn so far; those not ``there (B, S)`` found no room."""

    def __init__(self, count: int, task: Pathfinder) -> None:
        self.task = task
        self.dashes = torch.zeros(count, 0, 2, 2)
        self.there = torch.zeros(count, 0, dtype=torch.bool)

    def grow(self, generator: torch.Generator, starts: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Add a curve of ``number`` dashes to each image, beginning at a free one of the places ``starts (B, N, 2)``.

        Each dash begins ``gap`` after the last and turns by an angle d with chance ``~ cos^2(min(continuity |d|,
        pi/2))`` among the angles with room for it. Returns the first and the last tip, ``(B, 2, 2)``, and whether all
        dashes were drawn, ``(B,)``.
        """
        task, (count, tries) = self.task, starts.shape[:2]
        headings = 2 * pi * torch.rand(count, tries, generator=generator)
        dashes = torch.stack([starts, starts + task.dash * direction(headings)], 2)
        going, chosen = _pick(generator, self.free(dashes, self.dashes.shape[1]).double())
        every = torch.arange(count)
        current, heading = dashes[every, chosen], headings[every, chosen]
        self._add(current, going)
        tips = current.clone()
        for _ in range(number - 1):
            turns = pi * (2 * torch.rand(count, HEADINGS, generator=generator) - 1)
            onward = direction(heading[:, None] + turns)
            start = (current[:, 1] + task.gap * direction(heading))[:, None].expand_as(onward)
            ends = start + task.dash * onward
            dashes = torch.stack([start, ends], 2)
            others = self.dashes.shape[1] - 1  # all but the last, which the next one is near to
            weights = (task.continuity * turns.abs()).clamp(max=pi / 2).cos().square() * self.free(dashes, others)
            # A dash that heads for an edge or another curve leaves no room for the next; dashes that do are preferred.
            ahead = torch.stack([ends, ends + (task.gap + task.dash) * onward], 2)
            weights = weights * torch.where(self.free(ahead, others), 1.0, 1e-4)
            found, chosen = _pick(generator, weights.double())
            going = going & found
            current, heading = dashes[every, chosen], heading + turns[every, chosen]
            self._add(current, going)
            tips[going, 1] = current[going, 1]
        return tips, going

    def _add(self, dash: Tensor, there: Tensor) -> None:
        self.dashes = torch.cat([self.dashes, dash[:, None]], 1)
        self.there = torch.cat([self.there, there[:, None]], 1)

    def free(self, dashes: Tensor, others: int) -> Tensor:
        """Whether candidates ``(B, K, 2, 2)`` are inside and far enough from the first ``others`` dashes.

        Distances are measured between ends and middles. The true distance is less by at most
        ``(length / 4)^2 / (2 separation)``.
        """
        size = self.task.size
        inside = ((dashes >= PADDING) & (dashes <= size - PADDING)).flatten(2).all(2)
        if not others:
            return inside
        # Dashes that are not there are moved far away.
        laid = self.dashes[:, :others] + 9.0 * size * ~self.there[:, :others, None, None]
        # Ends and middles, (B, 3 N, 2).
        ours, theirs = (torch.stack([d[:, :, 0], d.mean(2), d[:, :, 1]], 2).flatten(1, 2) for d in (dashes, laid))
        near = torch.cdist(ours, theirs, compute_mode="use_mm_for_euclid_dist")
        return inside & (near.view(*dashes.shape[:2], -1).amin(2) >= self.task.separation)


def point_to_dash(points: Tensor, dashes: Tensor) -> Tensor:
    """Distances of points ``(..., 2)`` from dashes ``(..., 2, 2)``."""
    start, along = dashes[..., 0, :], dashes[..., 1, :] - dashes[..., 0, :]
    share = ((points - start) * along).sum(-1) / along.square().sum(-1).clamp(min=1e-12)
    return (points - start - share.clamp(0, 1)[..., None] * along).norm(dim=-1)


def direction(heading: Tensor) -> Tensor:
    return torch.stack([heading.cos(), heading.sin()], -1)


def _pick(generator: torch.Generator, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Whether any weight is above 1e-9, and an index drawn in proportion to the weights."""
    return (weights > 1e-9).any(1), distinct(generator, len(weights), weights.clamp(min=1e-30), 1)[:, 0]
