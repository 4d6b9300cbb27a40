"""Points of the pseudo-hyperboloid as a point on a sphere and the space part of one on a hyperboloid.

``x = (u, v)``, ``|u|^2 = |v|^2 + r^2``, is kept as ``sphere = r u / |u|`` and ``space = v``, which imply the height
``|u|``. Both parts can be transformed freely: the only constraint is that the sphere's part has norm r, which scaling
restores, also in fp32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.models.graph.arcs import cosine_and_sine

LONGEST = 14.5  # sinh of it is a million


@dataclass(frozen=True)
class Split:
    """``sphere (..., q + 1)`` of norm r, ``space (..., p)``, and the radius r of both, a number or a scalar tensor."""

    sphere: Tensor
    space: Tensor
    radius: Tensor | float

    @property
    def q(self) -> int:
        return self.sphere.shape[-1] - 1

    @property
    def p(self) -> int:
        return self.space.shape[-1]

    @property
    def height(self) -> Tensor:
        """``|u| = sqrt(|space|^2 + r^2)``, the time coordinate of the hyperboloid: ``(..., 1)``."""
        return (self.space.square().sum(-1, keepdim=True) + self.radius**2).sqrt()

    @property
    def time(self) -> Tensor:
        """u, the time coordinates on the pseudo-hyperboloid: ``(..., q + 1)``."""
        return self.height / self.radius * self.sphere

    @property
    def hyperboloid(self) -> Tensor:
        """``(height, space)``: ``(..., 1 + p)``."""
        return torch.cat([self.height, self.space], -1)

    def joined(self) -> Tensor:
        """The coordinates ``(u, v)`` on the pseudo-hyperboloid: ``(..., q + 1 + p)``."""
        return torch.cat([self.time, self.space], -1)


def restored(sphere: Tensor, space: Tensor, radius: Tensor | float) -> Split:
    """Make a point of any pair by scaling the sphere's part to norm r; 0, which has no direction, becomes the pole."""
    return Split(onto_sphere(sphere, radius), space, radius)


def onto_sphere(a: Tensor, radius: Tensor | float) -> Tensor:
    """``r a / |a|``; a single coordinate always becomes r, as the other sheet is not used."""
    if a.shape[-1] == 1:
        return torch.ones_like(a) * radius
    largest = a.detach().abs().amax(-1, keepdim=True)  # divide by this first, so that no square under- or overflows
    found = largest > torch.finfo(a.dtype).tiny ** 0.5
    pole = torch.zeros_like(a)
    pole[..., 0] = 1
    a = torch.where(found, a / torch.where(found, largest, 1), pole)
    return radius * a / torch.linalg.vector_norm(a, dim=-1, keepdim=True)


def from_pole(time: Tensor, space: Tensor, radius: Tensor | float) -> Split:
    """``exp_o(0, time, space)`` at the pole o: ``time (..., q)``, ``space (..., p)`` to a point of signature (q, p).

    Space-like vectors longer than 14.5 r are cut, as in ``PseudoHyperboloid.exp``.
    """
    z = (space.square().sum(-1, keepdim=True) - time.square().sum(-1, keepdim=True)) / radius**2
    sine_scale = LONGEST / z.clamp(min=LONGEST**2).sqrt()
    cosine, sine = cosine_and_sine(z.clamp(max=LONGEST**2))
    sine = sine * sine_scale
    return restored(torch.cat([cosine * radius, sine * time], -1), sine * space, radius)


def residual(branch: Split, skip: Split) -> Split:
    """``exp_Y(PT_{o -> Y}(log_o X))`` for X = Phi(branch), Y = Phi(skip): signature (q, p) to (q + 1, p).

    Since ``log_o X = (pi/2) X``, the transport keeps its norm and the exponential turns by a right angle:
    ``X + k (o + Y)``, ``k = <X, Y> / r^2``.
    """
    r = skip.radius
    x, y = branch.time, skip.time
    k = ((branch.space * skip.space).sum(-1, keepdim=True) - (x * y).sum(-1, keepdim=True)) / r**2
    return restored(torch.cat([k * r, x + k * y], -1), branch.space + k * skip.space, r)


def merge(x: Split, y: Split, weight: float | Tensor) -> Split:
    """``exp_o(w log_o Phi(x) + (1 - w) log_o Phi(y))``: signature (q, p) to (q + 1, p)."""
    time = torch.pi / 2 * (weight * x.time + (1 - weight) * y.time)
    space = torch.pi / 2 * (weight * x.space + (1 - weight) * y.space)
    return from_pole(time, space, x.radius)


def centroid(sphere: Tensor, hyperboloid: Tensor, total: Tensor | float, radius: Tensor | float) -> Split:
    """The centroid of points, from their weighted sums: ``sphere`` restored, and ``r m / sqrt(-<m, m>)`` of the other.

    m is ``hyperboloid (..., 1 + p)``; ``total`` is the sum of the weights, which are non-negative: ``-<m, m>`` is then
    at least ``total^2 r^2``, a bound that keeps rounding errors out of the root. If all weights are 0, like those of
    features that ReLU has cut off, the centroid is the pole.
    """
    height, space = hyperboloid.split([1, hyperboloid.shape[-1] - 1], -1)
    length = torch.linalg.vector_norm(space, dim=-1, keepdim=True)
    squared = (height - length) * (height + length)
    squared = torch.maximum(squared, (total * radius) ** 2 * torch.ones_like(squared))
    found = squared > torch.finfo(squared.dtype).tiny
    factor = torch.where(found, torch.where(found, squared, 1).rsqrt(), 0)
    return restored(sphere, radius * space * factor, radius)


def midpoint(x: Split, y: Split, weight: float | Tensor = 0.5) -> Split:
    """The centroid of x and y with weights w and 1 - w; the signature (q, p) stays."""
    sphere = weight * x.sphere + (1 - weight) * y.sphere
    return centroid(sphere, weight * x.hyperboloid + (1 - weight) * y.hyperboloid, 1.0, x.radius)
