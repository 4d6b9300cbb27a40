"""The pseudo-hyperboloid: a curved space with q dimensions of time and p of space, and two ways to write its points.

``x = (u, v)``, ``|u|^2 = |v|^2 + r^2``, are its coordinates, time first (:class:`PseudoHyperboloid`). Layers keep
``sphere = r u / |u|`` and ``space = v`` instead, which imply the height ``|u|`` (:class:`Split`): both parts can be
transformed freely, as the only constraint is that the sphere's part has norm r, which scaling restores, also in fp32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    cosine, sine = _cut(z)
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


@dataclass(frozen=True)
class PseudoHyperboloid:
    """``{x in R^(q+1+p): <x, x> = -r^2}``, ``<x, y> = -x_0 y_0 - ... - x_q y_q + x_(q+1) y_(q+1) + ...``

    Points and tangent vectors are ``(..., q + 1 + p)``, time first; all maps accept any number of leading axes. q = 0
    is the upper sheet of the hyperboloid, p = 0 the sphere of radius r. The signature is written (q, p) = (time,
    space), and the curvature is ``beta = -r^2``.

    Args:
        q: dimensions of time.
        p: dimensions of space.
        radius: r > 0.
    """

    q: int
    p: int
    radius: Tensor | float = 1.0

    def __post_init__(self) -> None:
        if min(self.q, self.p) < 0 or self.q + self.p < 1:
            raise ValueError(f"(q, p) must be >= 0 and not both 0, got ({self.q}, {self.p})")

    @property
    def width(self) -> int:
        return self.q + 1 + self.p

    def pole(self, like: Tensor) -> Tensor:
        """The pole ``(r, 0, ..., 0)``, in the dtype and on the device of ``like``."""
        return torch.eye(1, self.width, dtype=like.dtype, device=like.device)[0] * self.radius

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """``<x, y>``: ``(..., q + 1 + p)`` to ``(..., 1)``."""
        time, space = (x * y).split([self.q + 1, self.p], -1)
        return space.sum(-1, keepdim=True) - time.sum(-1, keepdim=True)

    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        """The point that the geodesic from x with velocity v, tangent at x, reaches at time 1.

        A space-like v is cut to the length 14.5 r, at which coordinates exceed a million r: fp32 has no digits beyond
        that.
        """
        cosine, sine = _cut(self.inner(v, v) / self.radius**2)
        return cosine * x + sine * v

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """The velocity with which a geodesic from x reaches y at time 1; NaN where ``<x, y> >= r^2`` and none does."""
        delta = self._beyond(x, y)
        return arc_over_sine(delta) * (y - x - delta * x)

    def transport(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """Transport u, tangent at x, along the geodesic to y: ``u - <u, y> / (<x, y> - r^2) (x + y)``."""
        return u - self.inner(u, y) / (self.inner(x, y) - self.radius**2) * (x + y)

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Length ``(...)`` of the geodesic from x to y; if none joins them, ``pi r`` plus the distance from -x."""
        delta, opposite = self._beyond(x, y), self._beyond(-x, y)
        joined = delta > -2
        near = arc(torch.where(joined, delta, 0))
        far = torch.pi + arc(torch.where(joined, 0, opposite.clamp(min=0)))
        return (self.radius * torch.where(joined, near, far)).squeeze(-1)

    def _beyond(self, x: Tensor, y: Tensor) -> Tensor:
        """``<x, y> / beta - 1``, from the difference of the points, as close points would cancel in fp32."""
        step = x - y
        return self.inner(step, step) / (2 * self.radius**2)

    def extended(self) -> "PseudoHyperboloid":
        """The space that :meth:`phi` maps to, with one more dimension of time."""
        return PseudoHyperboloid(self.q + 1, self.p, self.radius)

    def phi(self, x: Tensor) -> Tensor:
        """``Phi(x) = (0, x)``: a geodesic joins the pole of :meth:`extended` to every point that starts with 0."""
        return torch.cat([torch.zeros_like(x[..., :1]), x], -1)

    def psi(self, x: Tensor) -> Split:
        """``Psi(u, v) = (r u / |u|, v)``: a point of a sphere and a space part; the inverse of ``Split.joined``."""
        u, v = x.split([self.q + 1, self.p], -1)
        return Split(self.radius * u / torch.linalg.vector_norm(u, dim=-1, keepdim=True), v, self.radius)


# Functions of geodesics that stay smooth, with finite gradients, where the kind of the geodesic changes. In terms of
# its signed squared length z, the circle (z < 0) and the hyperbola (z > 0) are one analytic function. The usual
# formulas with sqrt(abs(z)) have no gradient at 0, so near 0 the power series is used instead.
_NEAR = 1e-2  # the series is used below this: its first omitted term is under 1e-16
_COSINE = [1 / math.factorial(2 * n) for n in range(7)]
_SINE = [1 / math.factorial(2 * n + 1) for n in range(7)]
_ARC = [(-2.0) ** n * math.factorial(n) ** 2 / math.factorial(2 * n + 1) for n in range(10)]


def cosine_and_sine(z: Tensor) -> tuple[Tensor, Tensor]:
    """``(cosh s, sinh s / s)``, ``s = sqrt(z)``, for z > 0; ``(cos s, sin s / s)``, ``s = sqrt(-z)``, for z < 0."""
    near = z.abs() < _NEAR
    small = torch.where(near, z, 0)
    s = torch.where(near, 1, z).abs().sqrt()  # 1: the branch that where() does not take must have a finite gradient too
    up = torch.where(z > 0, s, 1)
    cosine = torch.where(z > 0, up.cosh(), s.cos())
    sine = torch.where(z > 0, up.sinh() / up, s.sin() / s)
    return torch.where(near, _series(_COSINE, small), cosine), torch.where(near, _series(_SINE, small), sine)


def _cut(z: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`cosine_and_sine` of arcs that are cut to the length ``LONGEST``; the sine is that of the whole vector."""
    scale = LONGEST / z.clamp(min=LONGEST**2).sqrt()
    cosine, sine = cosine_and_sine(z.clamp(max=LONGEST**2))
    return cosine, sine * scale


def arc_over_sine(delta: Tensor) -> Tensor:
    """``arccosh(c) / sqrt(c^2 - 1)``, ``c = 1 + delta``; for c < 1 ``arccos(c) / sqrt(1 - c^2)``, NaN for c <= -1."""
    near = delta.abs() < _NEAR
    small = torch.where(near, delta, 0)
    up, down = torch.where(delta > _NEAR, delta, 1), torch.where((delta < -_NEAR) & (delta > -2), delta, -1)
    above = torch.acosh(1 + up) / (up * (up + 2)).sqrt()
    below = torch.acos(1 + down) / (-down * (down + 2)).sqrt()
    far = torch.where(delta > 0, above, torch.where(delta > -2, below, torch.nan))
    return torch.where(near, _series(_ARC, small), far)


def arc(delta: Tensor) -> Tensor:
    """The length of a geodesic, ``arccosh(c)``, or ``arccos(c)`` for c < 1, with ``c = 1 + delta > -1``.

    Computed by half angles, ``2 arsinh(sqrt(delta / 2))`` and ``2 arcsin(sqrt(-delta / 2))``, which lose no precision
    near c = 1. Below arcs of 1e-5 (fp32) the gradient of the root would grow without bound, so a straight line replaces
    it.
    """
    eps = torch.finfo(delta.dtype).eps
    tiny = eps**1.5
    half = delta.abs() / 2
    root = torch.where(half > tiny, half.clamp(min=tiny).sqrt(), half / math.sqrt(tiny))
    # The arcsine has no gradient at 1 either, which is c = -1, the edge of what geodesics reach.
    return 2 * torch.where(delta > 0, root.asinh(), root.clamp(max=1 - eps).asin())


def _series(coefficients: Sequence[float], z: Tensor) -> Tensor:
    total = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * z + coefficient
    return total
