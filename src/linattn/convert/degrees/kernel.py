"""The kernel of softmax attention, its positive random features, and how many of them it takes.

With ``y = x / D^{1/4}`` and ``phi(x; z) = exp(z . y - |y|^2 / 2)`` the kernel is a mean over z:

    K(x, x') = exp(x . x' / sqrt(D)) = E_{z ~ N(0, I)} phi(x; z) phi(x'; z)

On J points with Gram matrix ``S = [K(x_i, x_j)]``, whose largest eigenvalue is s_1, the ridge leverage score of z and
the degrees of freedom at a tolerance lambda, in units of s_1, are

    tau(z) = phi^T (S + lambda s_1 I)^-1 phi,     N = E tau(z) = tr S (S + lambda s_1 I)^-1

Features drawn from the density ``q = tau / N``, relative to N(0, I), are the fewest that do. Reference: Nishikawa,
Higuchi and Suzuki, arXiv 2507.03340 (NeurIPS 2025); Bach, arXiv 1502.06800.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

CANDIDATES = 4096  # drawn and scored at once


class PositiveFeatures(NamedTuple):
    """``Phi(x)_m = sqrt(alpha_m / M) phi(x; z_m)``: the mean of ``Phi(x) . Phi(x')`` is ``K(x, x')``.

    For that ``alpha = 1`` where ``z ~ N(0, I)``, and ``1 / q(z)`` where z is drawn from a density q relative to it.
    """

    z: Tensor  # (H, M, D)
    log_alpha: Tensor  # (H, M)


def normal_features(heads: int, count: int, dim: int, generator: Generator | None = None) -> PositiveFeatures:
    """Draw features uniformly: ``z ~ N(0, I)``, ``alpha = 1``."""
    z = torch.randn(heads, count, dim, generator=generator, dtype=torch.float64)
    return PositiveFeatures(z, z.new_zeros(heads, count))


def scaled(x: Tensor) -> Tensor:
    """``y = x / D^{1/4}``, so that ``K(x, x') = exp(y . y')``."""
    return x * x.shape[-1] ** -0.25


def log_features(y: Tensor, features: PositiveFeatures) -> Tensor:
    """``log Phi`` of scaled inputs: ``(..., H, N, D) -> (..., H, N, M)``. In logarithms, since Phi itself overflows."""
    z, log_alpha = (part.to(y) for part in features)
    half = (log_alpha - math.log(z.shape[-2])) / 2
    return y @ z.mT - y.square().sum(-1, keepdim=True) / 2 + half.unsqueeze(-2)


def log_estimate(y_q: Tensor, y_k: Tensor, features: PositiveFeatures) -> Tensor:
    """``log K^(x, x') = log(Phi(x) . Phi(x'))``: scaled ``(..., H, N, D)``, ``(..., H, N', D) -> (..., H, N, N')``.

    The features of each row are divided by the largest of them, whose logarithm is added to the result. An estimate
    below the smallest number of the dtype in these units is set to that number, so that its logarithm stays finite.
    """
    log_q, log_k = log_features(y_q, features), log_features(y_k, features)
    top_q, top_k = (x.detach().amax(-1, keepdim=True) for x in (log_q, log_k))
    products = (log_q - top_q).exp() @ (log_k - top_k).exp().mT
    return products.clamp_min(torch.finfo(products.dtype).tiny).log() + top_q + top_k.mT


class Spectrum(NamedTuple):
    """Eigenvalues of the Gram matrix over the largest one, in falling order, and the eigenvectors if asked for."""

    values: Tensor  # (..., J), fp64, between 0 and 1
    vectors: Tensor | None  # (..., J, J), columns
    log_top: Tensor  # (...), logarithm of the largest eigenvalue of [K(x_i, x_j)]


def spectrum(points: Tensor, *, vectors: bool = False) -> Spectrum:
    """Eigenvalues of ``[K(x_i, x_j)] (J, J)`` of points ``(..., J, D)``, in fp64, in units of the largest.

    ``K(x, x) >= 1`` grows exponentially with the norm of x, and the paper's text leaves the matrix's scale open. In
    these units the result does not change when all scores are shifted, and nothing overflows: the largest score is
    subtracted before the exponential.
    """
    y = scaled(points.double())
    scores = y @ y.mT
    largest = scores.amax((-2, -1), keepdim=True)
    gram = (scores - largest).exp()
    values, basis = torch.linalg.eigh(gram) if vectors else (torch.linalg.eigvalsh(gram), None)
    values = values.flip(-1).clamp_min(0)  # rounding can leave tiny negative eigenvalues
    top = values[..., :1]
    log_top = largest.flatten(-2).squeeze(-1) + top.squeeze(-1).log()
    return Spectrum(values / top, None if basis is None else basis.flip(-1), log_top)


def effective_dimension(values: Tensor, tolerance: float) -> Tensor:
    """``N = sum_i s_i / (s_i + lambda)`` of relative eigenvalues: ``(..., J) -> (...)``."""
    return (values / (values + tolerance)).sum(-1)


def kernel_degrees(points: Tensor, tolerance: float = 2**-8) -> Tensor:
    """Degrees of freedom of each head: ``points (..., J, D) -> (...)``, between ``1 / (1 + tolerance)`` and J.

    Example:
        >>> import torch
        >>> round(kernel_degrees(torch.ones(1, 50, 8), 2**-4).item(), 4)  # one point, 50 times: 1 / (1 + 1/16)
        0.9412
    """
    return effective_dimension(spectrum(points).values, tolerance)


class LeverageDensity:
    """The density q of one head on ``points (J, D)``: scores any z, and draws (z, alpha).

    Candidates from N(0, I) would hardly ever fall where points of large norm need them. Draws from q can be exact all
    the same: the mixture of normals around ``2 y_j`` with weights ``K(x_j, x_j)`` has the density ``|phi|^2 / tr S``,
    and since ``tau <= |phi|^2 / (lambda s_1)`` a candidate from it is accepted with probability

        lambda s_1 tau(z) / |phi|^2 = 1 - sum_r c_r (u_r . phi)^2 / |phi|^2,     c_r = s_r / (s_r + lambda s_1)

    with eigenvectors u_r of S. On average at least ``lambda / (1 + lambda)`` of the candidates are accepted.

    Attributes:
        degrees: N, the degrees of freedom.
        limit: upper bound of ``tau(z) / q(z)`` for every z: N up to a thousandth.
    """

    def __init__(self, points: Tensor, tolerance: float = 2**-8) -> None:
        self.tolerance, self._y = tolerance, scaled(points.double())
        values, vectors, self._log_top = spectrum(points, vectors=True)
        assert vectors is not None
        self.degrees = float(effective_dimension(values, tolerance))
        # Directions with an eigenvalue far below the tolerance change tau by a thousandth at most, and are left out.
        # What is left, divided by its own mean instead of N, is still a density, and alpha is its inverse.
        kept = int((values > 1e-3 * tolerance).sum())
        self._weights, self._vectors = values[:kept] / (values[:kept] + tolerance), vectors[:, :kept]
        self.limit = float(self._weights.sum() + values[kept:].sum() / tolerance)

    def scores(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``log tau(z)`` of ``z (R, D)``, and the probabilities that candidates there are accepted, ``(R,)`` each."""
        log_phi = z @ self._y.mT - self._y.square().sum(-1) / 2  # (R, J)
        log_square = torch.logsumexp(2 * log_phi, -1)
        direction = (log_phi - log_square.unsqueeze(-1) / 2).exp()
        accepted = 1 - ((direction @ self._vectors).square() * self._weights).sum(-1)
        # The exact value is at least lambda / (1 + lambda), as eigenvalues are at most 1.
        accepted = accepted.clamp(self.tolerance / (1 + self.tolerance), 1)
        return accepted.log() + log_square - self._log_top - math.log(self.tolerance), accepted

    def draw(self, count: int, generator: Generator | None = None) -> PositiveFeatures:
        """Draw ``count`` independent features of one head, with ``alpha = 1 / q(z) = N / tau(z)``."""
        squares = self._y.square().sum(-1)
        weights = (squares - squares.max()).exp()  # K(x_j, x_j) up to a factor
        drawn: list[Tensor] = []
        alphas: list[Tensor] = []
        missing = count
        while missing > 0:
            chosen = torch.multinomial(weights, CANDIDATES, replacement=True, generator=generator)
            noise = torch.randn(CANDIDATES, self._y.shape[-1], generator=generator, dtype=self._y.dtype)
            z = 2 * self._y[chosen] + noise
            log_tau, accepted = self.scores(z)
            taken = torch.rand(CANDIDATES, generator=generator, dtype=z.dtype) < accepted
            drawn.append(z[taken][:missing])
            alphas.append(math.log(self.limit) - log_tau[taken][:missing])
            missing -= len(drawn[-1])
        return PositiveFeatures(torch.cat(drawn)[None], torch.cat(alphas)[None])
