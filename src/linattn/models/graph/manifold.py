"""The pseudo-hyperboloid: a curved space with q dimensions of time and p of space."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.models.graph.arcs import arc, arc_over_sine, cosine_and_sine
from linattn.models.graph.split import LONGEST, Split


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
        z = self.inner(v, v) / self.radius**2
        scale = LONGEST / z.clamp(min=LONGEST**2).sqrt()
        cosine, sine = cosine_and_sine(z.clamp(max=LONGEST**2))
        return cosine * x + sine * scale * v

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
        """``Psi(u, v) = (r u / |u|, v)``: the point as a sphere's point and a space part v, which implies ``|u|``."""
        u, v = x.split([self.q + 1, self.p], -1)
        return Split(self.radius * u / torch.linalg.vector_norm(u, dim=-1, keepdim=True), v, self.radius)

    def psi_inverse(self, x: Split) -> Tensor:
        """``(|u| / r sphere, space)``, the inverse of :meth:`psi`."""
        return x.joined()
