"""Random features drawn where the kernel needs them: from the density of ridge leverage scores.

    tau(z) = <phi(.; z), (Sigma + lambda)^-1 phi(.; z)>,     q(z) = tau(z) / N,     N = E_{z ~ N(0, I)} tau(z)

N is the degrees of freedom, and q the density (relative to N(0, I)) that needs the fewest features. On a sample of J
points, ``phi = (phi(x_j; z))_j`` and Gram matrix S with the tolerance in units of its largest eigenvalue s_1,
``tau(z) = phi^T (S + lambda s_1 I)^-1 phi``.

Candidates from N(0, I) would hardly ever fall where points of large norm need them. Draws from q can be exact all the
same: the mixture of normals around ``2 y_j`` with weights ``K(x_j, x_j)`` has the density ``|phi|^2 / tr S``, and since
``tau <= |phi|^2 / (lambda s_1)`` a candidate from it is accepted with probability

    lambda s_1 tau(z) / |phi|^2 = 1 - sum_r c_r (u_r . phi)^2 / |phi|^2,     c_r = s_r / (s_r + lambda s_1)

with eigenvectors u_r of S. On average at least ``lambda / (1 + lambda)`` of the candidates are accepted.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from linattn.convert.degrees.gram import Spectrum, effective_dimension, spectrum
from linattn.convert.degrees.kernel import PositiveFeatures, scaled

CANDIDATES = 4096  # drawn and scored at once


class Scored(NamedTuple):
    """For each z: ``log tau(z)``, and the probability that a candidate at z is accepted."""

    log_tau: Tensor
    accepted: Tensor


class LeverageDensity:
    """The density q of one head on ``points (J, D)``: scores any z, and draws (z, alpha).

    Attributes:
        degrees: N, the degrees of freedom.
        limit: upper bound of ``tau(z) / q(z)`` for every z: N up to a thousandth.
    """

    def __init__(self, points: Tensor, tolerance: float = 2**-8, scale: float | None = None) -> None:
        if points.dim() != 2:
            raise ValueError(f"points must be (J, D), got {tuple(points.shape)}")
        self.tolerance = tolerance
        self._y = scaled(points.double(), scale)
        self._spectrum: Spectrum = spectrum(points, scale, vectors=True)
        values, vectors = self._spectrum.values, self._spectrum.vectors
        assert vectors is not None
        self.degrees = float(effective_dimension(values, tolerance))
        # Directions with an eigenvalue far below the tolerance change tau by a thousandth at most, and are left out.
        # What is left, divided by its own mean instead of N, is still a density, and alpha is its inverse.
        kept = int((values > 1e-3 * tolerance).sum())
        self._weights = values[:kept] / (values[:kept] + tolerance)
        self._vectors = vectors[:, :kept]
        self.limit = float(self._weights.sum() + values[kept:].sum() / tolerance)

    def scores(self, z: Tensor) -> Scored:
        """Score ``z (R, D) -> (R,)``; the mean of tau over N(0, I) is ``degrees``, up to a thousandth."""
        log_phi = z @ self._y.mT - self._y.square().sum(-1) / 2  # (R, J)
        log_square = torch.logsumexp(2 * log_phi, -1)
        direction = (log_phi - log_square.unsqueeze(-1) / 2).exp()
        accepted = 1 - ((direction @ self._vectors).square() * self._weights).sum(-1)
        # The exact value is at least lambda / (1 + lambda), as eigenvalues are at most 1.
        accepted = accepted.clamp(self.tolerance / (1 + self.tolerance), 1)
        log_tau = accepted.log() + log_square - self._spectrum.log_top - math.log(self.tolerance)
        return Scored(log_tau, accepted)

    def draw(self, count: int, generator: Generator | None = None) -> PositiveFeatures:
        """Draw ``count`` independent features of one head, with ``alpha = 1 / q(z) = N / tau(z)``."""
        squares = self._y.square().sum(-1)
        weights = (squares - squares.max()).exp()  # K(x_j, x_j) up to a factor
        found: list[Tensor] = []
        alphas: list[Tensor] = []
        missing = count
        while missing > 0:
            chosen = torch.multinomial(weights, CANDIDATES, replacement=True, generator=generator)
            noise = torch.randn(CANDIDATES, self._y.shape[-1], generator=generator, dtype=self._y.dtype)
            z = 2 * self._y[chosen] + noise
            log_tau, accepted = self.scores(z)
            taken = torch.rand(CANDIDATES, generator=generator, dtype=z.dtype) < accepted
            found.append(z[taken][:missing])
            alphas.append(math.log(self.limit) - log_tau[taken][:missing])
            missing -= len(found[-1])
        return PositiveFeatures(torch.cat(found)[None], torch.cat(alphas)[None])


def leverage_features(
    points: Tensor, count: int, tolerance: float = 2**-8, scale: float | None = None, generator: Generator | None = None
) -> PositiveFeatures:
    """Draw ``count`` features for each head: ``points (H, J, D)`` -> z ``(H, M, D)``, log alpha ``(H, M)``.

    They can be used as they are, or as a start for learning.
    """
    heads = [LeverageDensity(head, tolerance, scale).draw(count, generator) for head in points]
    return PositiveFeatures(torch.cat([head.z for head in heads]), torch.cat([head.log_alpha for head in heads]))
