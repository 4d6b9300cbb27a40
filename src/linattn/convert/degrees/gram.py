"""Degrees of freedom of the attention kernel on a sample of queries and keys.

Reference: Nishikawa, Higuchi and Suzuki, arXiv 2507.03340 (NeurIPS 2025); Bach, arXiv 1502.06800.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.convert.degrees.kernel import scaled


class Spectrum(NamedTuple):
    """Eigenvalues of the Gram matrix over the largest one, in falling order, and the eigenvectors if asked for."""

    values: Tensor  # (..., J), fp64, between 0 and 1
    vectors: Tensor | None  # (..., J, J), columns
    log_top: Tensor  # (...), logarithm of the largest eigenvalue of [K(x_i, x_j)]


def spectrum(points: Tensor, scale: float | None = None, *, vectors: bool = False) -> Spectrum:
    """Eigenvalues of the kernel matrix ``[K(x_i, x_j)] (J, J)``, ``K(x, x') = exp(scale x . x')``, in fp64.

    The points are ``(..., J, D)``. ``K(x, x) >= 1`` grows exponentially with the norm of x, and the paper's text leaves
    the matrix's scale open. This function divides the matrix by its largest eigenvalue, so the tolerance is relative
    to that; the result does not change when all scores are shifted; and nothing overflows, as the largest score is
    subtracted before the exponential.
    """
    if points.shape[-2] < 1:
        raise ValueError(f"points must be (..., J, D) with J >= 1, got {tuple(points.shape)}")
    y = scaled(points.double(), scale)
    scores = y @ y.mT
    largest = scores.amax((-2, -1), keepdim=True)
    gram = (scores - largest).exp()
    if vectors:
        values, basis = torch.linalg.eigh(gram)
        basis = basis.flip(-1)
    else:
        values, basis = torch.linalg.eigvalsh(gram), None
    values = values.flip(-1).clamp_min(0)  # rounding can leave tiny negative eigenvalues
    top = values[..., :1]
    return Spectrum(values / top, basis, largest.flatten(-2).squeeze(-1) + top.squeeze(-1).log())


def effective_dimension(values: Tensor, tolerance: float) -> Tensor:
    """``N = tr S (S + lambda I)^-1 = sum_i s_i / (s_i + lambda)`` of relative eigenvalues: ``(..., J) -> (...)``."""
    if not tolerance > 0:
        raise ValueError(f"tolerance must be > 0, got {tolerance!r}")
    return (values / (values + tolerance)).sum(-1)


def kernel_degrees(points: Tensor, tolerance: float = 2**-8, scale: float | None = None) -> Tensor:
    """Degrees of freedom of each head: ``points (..., J, D) -> (...)``, between ``1 / (1 + tolerance)`` and J.

    Example:
        >>> import torch
        >>> round(kernel_degrees(torch.ones(1, 50, 8), 2**-4).item(), 4)  # one point, 50 times: 1 / (1 + 1/16)
        0.9412
    """
    return effective_dimension(spectrum(points, scale).values, tolerance)
