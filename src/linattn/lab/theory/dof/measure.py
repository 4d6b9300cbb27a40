"""Errors of the approximated kernel, and the theoretical bound on them.

On J points the kernel is ``Sigma = [K(x_i, x_j)] / J`` and its estimate with M features ``Sigma^``. Let N be the
degrees of freedom at tolerance lambda. ``(Sigma + lambda)^{-1/2} Sigma^ (Sigma + lambda)^{-1/2}`` is a mean of M
independent matrices of rank one, each of norm at most N where z is drawn by leverage scores (by N(0, I) there is no
such limit).
Bernstein's inequality for matrices (Tropp, arXiv 1501.01571, theorem 7.7.1) gives with probability 1 - delta

    -t (Sigma + lambda) <= Sigma^ - Sigma <= t (Sigma + lambda),   t^2 / 2 = (p + t / 3) (N / M) log(8 N / (p delta))

with ``p = s_1 / (s_1 + lambda)``, from which the two statements of arXiv 2507.03340 follow:

- ``|K - K^|_{L2(rho x rho)} = |Sigma^ - Sigma|_HS`` is at most ``t |Sigma + lambda|_HS``; and, as the trace of Sigma^
  is at most ``1 / delta`` times its mean with probability 1 - delta, its square at most
  ``t (s_1 + lambda) tr(Sigma) (1 + 1 / delta)``;
- a sum weighted by attention, ``sum_i K(x_i, .) v_i / J``, has the error ``|Sigma^ - Sigma|_op |v|`` for the worst v,
  which is at most ``t (s_1 + lambda) |v|``.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from linattn.convert.degrees.gram import spectrum
from linattn.convert.degrees.kernel import PositiveFeatures, log_estimate, normal_features, scaled
from linattn.convert.degrees.leverage import LeverageDensity
from linattn.lab.theory.dof.activations import Head
from linattn.lab.theory.dof.settings import DofConfig

SAMPLINGS = ("normal", "leverage")


@dataclass(frozen=True)
class Row:
    """One head, sampling and number of features, with the errors of each seed; a bound is None if there is none."""

    source: str
    head: str
    sampling: str
    count: int
    degrees: float
    kernel_error: list[float]  # |Sigma^ - Sigma|_HS / |Sigma|_HS
    sum_error: list[float]  # |Sigma^ - Sigma|_op / |Sigma|_op
    row_error: list[float]  # mean total variation between rows of attention
    kernel_bound: float | None = None
    sum_bound: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_head(head: Head, config: DofConfig) -> Iterator[Row]:
    """Measure all samplings and all numbers of features on the points of one head."""
    y = scaled(head.points.double())
    scores = y @ y.mT
    density = LeverageDensity(head.points, config.tolerance)
    eigenvalues = spectrum(head.points).values
    for sampling in SAMPLINGS:
        for count in sorted(set(config.counts)):
            errors = []
            for seed in range(config.seeds):
                generator = Generator().manual_seed(1_000_003 * config.seed + 10_007 * seed + count)
                features = (
                    density.draw(count, generator)
                    if sampling == "leverage"
                    else normal_features(1, count, y.shape[-1], generator)
                )
                errors.append(_errors(y, scores, features))
            kernel, weighted, rows = (list(column) for column in zip(*errors, strict=True))
            bounds = error_bounds(eigenvalues, density, count, config) if sampling == "leverage" else (None, None)
            yield Row(head.source, head.name, sampling, count, density.degrees, kernel, weighted, rows, *bounds)


def _errors(y: Tensor, scores: Tensor, features: PositiveFeatures) -> tuple[float, float, float]:
    logs = log_estimate(y[None], y[None], features)[0]
    unit = scores.max()
    kernel = (scores - unit).exp()
    difference = (logs - unit).exp() - kernel
    rows = (logs.softmax(-1) - scores.softmax(-1)).abs().sum(-1).mean() / 2
    worst = torch.linalg.eigvalsh(difference).abs().max() / torch.linalg.eigvalsh(kernel).max()
    return float(difference.norm() / kernel.norm()), float(worst), float(rows)


def error_bounds(eigenvalues: Tensor, density: LeverageDensity, count: int, config: DofConfig) -> tuple[float, float]:
    """Bounds of both errors, in the same units; ``eigenvalues (J,)`` are relative to the largest."""
    t = deviation(density.limit, count, config.tolerance, config.delta)
    tolerance, size = config.tolerance, float(eigenvalues.norm())
    first = t * float((eigenvalues + tolerance).norm())
    second = math.sqrt(t * (1 + tolerance) * float(eigenvalues.sum()) * (1 + 1 / config.delta))
    return min(first, second) / size, t * (1 + tolerance)


def deviation(degrees: float, count: int, tolerance: float, delta: float) -> float:
    """t of the inequality in this module's docstring; the tolerance is in units of the largest eigenvalue."""
    p = 1 / (1 + tolerance)
    a = degrees / count * math.log(8 * degrees / (p * delta))
    return a / 3 + math.sqrt(a * a / 9 + 2 * a * p)
