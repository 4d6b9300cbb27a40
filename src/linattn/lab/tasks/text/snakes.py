"""Grows dashed curves that do not touch, for many images at once."""

from math import pi

import torch
from torch import Tensor

from linattn.lab.tasks.text.draws import distinct

HEADINGS = 16  # directions tried for each next dash


class Drawing:
    """Dashes ``(B, S, 2 ends, 2 coordinates)`` drawn so far; those not ``there (B, S)`` found no room."""

    def __init__(self, count: int, size: int, padding: float) -> None:
        self.size, self.padding = size, padding
        self.dashes = torch.zeros(count, 0, 2, 2)
        self.there = torch.zeros(count, 0, dtype=torch.bool)

    def add(self, dash: Tensor, there: Tensor) -> None:
        self.dashes = torch.cat([self.dashes, dash[:, None]], 1)
        self.there = torch.cat([self.there, there[:, None]], 1)

    def keep(self, images: Tensor) -> None:
        """Keep only these images."""
        self.dashes, self.there = self.dashes[images], self.there[images]

    def free(self, dashes: Tensor, separation: float, skip_last: bool) -> Tensor:
        """Whether candidates ``(B, K, 2, 2)`` are inside and far enough from all dashes, or all but the last.

        Distances are measured between ends and middles. The true distance is less by at most
        ``(length / 4)^2 / (2 separation)``.
        """
        inside = ((dashes >= self.padding) & (dashes <= self.size - self.padding)).flatten(2).all(2)
        end = self.dashes.shape[1] - int(skip_last)
        if end <= 0:
            return inside
        # Dashes that are not there are moved far away.
        laid = self.dashes[:, :end] + 9.0 * self.size * ~self.there[:, :end, None, None]
        near = torch.cdist(_points(dashes), _points(laid), compute_mode="use_mm_for_euclid_dist")
        return inside & (near.view(*dashes.shape[:2], -1).amin(2) >= separation)


def _points(dashes: Tensor) -> Tensor:
    """Ends and middles ``(B, 3 N, 2)`` of dashes ``(B, N, 2, 2)``."""
    return torch.stack([dashes[:, :, 0], dashes.mean(2), dashes[:, :, 1]], 2).flatten(1, 2)


def point_to_dash(points: Tensor, dashes: Tensor) -> Tensor:
    """Distances of points ``(..., 2)`` from dashes ``(..., 2, 2)``."""
    start, along = dashes[..., 0, :], dashes[..., 1, :] - dashes[..., 0, :]
    share = ((points - start) * along).sum(-1) / along.square().sum(-1).clamp(min=1e-12)
    return (points - start - share.clamp(0, 1)[..., None] * along).norm(dim=-1)


def direction(heading: Tensor) -> Tensor:
    return torch.stack([heading.cos(), heading.sin()], -1)


def grow(
    generator: torch.Generator,
    drawing: Drawing,
    starts: Tensor,
    number: int,
    dash: float,
    gap: float,
    separation: float,
    continuity: float,
) -> tuple[Tensor, Tensor]:
    """Add a curve of ``number`` dashes to each image, beginning at a free one of the places ``starts (B, N, 2)``.

    Each dash begins ``gap`` after the last and turns by an angle d with chance ``~ cos^2(min(continuity |d|, pi/2))``
    among the angles with room for it. Returns the first and the last tip, ``(B, 2, 2)``, and the number of dashes that
    were drawn, ``(B,)``.
    """
    count, tries = starts.shape[:2]
    headings = 2 * pi * torch.rand(count, tries, generator=generator)
    dashes = torch.stack([starts, starts + dash * direction(headings)], 2)
    going, chosen = _pick(generator, drawing.free(dashes, separation, False).double())
    every = torch.arange(count)
    current, heading = dashes[every, chosen], headings[every, chosen]
    drawing.add(current, going)
    tips, laid = current.clone(), going.long()
    for _ in range(number - 1):
        turns = pi * (2 * torch.rand(count, HEADINGS, generator=generator) - 1)
        start = current[:, 1] + gap * direction(heading)
        ends = start[:, None] + dash * direction(heading[:, None] + turns)
        dashes = torch.stack([start[:, None].expand_as(ends), ends], 2)
        weights = (continuity * turns.abs()).clamp(max=pi / 2).cos().square() * drawing.free(dashes, separation, True)
        # A dash that heads for an edge or another curve leaves no room for the next; dashes that do are preferred.
        ahead = torch.stack([dashes[:, :, 1], ends + (gap + dash) * direction(heading[:, None] + turns)], 2)
        weights = weights * torch.where(drawing.free(ahead, separation, True), 1.0, 1e-4)
        found, chosen = _pick(generator, weights.double())
        going = going & found
        current, heading = dashes[every, chosen], heading + turns[every, chosen]
        drawing.add(current, going)
        tips[going, 1] = current[going, 1]
        laid += going
    return tips, laid


def _pick(generator: torch.Generator, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Whether any weight is above 1e-9, and an index drawn in proportion to the weights."""
    return (weights > 1e-9).any(1), distinct(generator, len(weights), weights.clamp(min=1e-30), 1)[:, 0]
