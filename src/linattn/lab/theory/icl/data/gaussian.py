"""Independent examples with any covariances: the full optimum, one of low rank, and that of a low-rank update."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.lab.theory.icl.data.base import DataModel, Examples, Optimum, Weighting, labelled, normal


@dataclass(frozen=True, eq=False)
class Gaussian(DataModel):
    """``x, x_i ~ N(0, Sx)``, task ``b ~ N(0, Sb)``, ``y_i = b^T x_i + noise``.

    With ``S = Sx^1/2 Sb Sx^1/2``, ``M = tr S + noise`` and ``A = (n+1) S + M I``, a preconditioner W, which is
    ``V = Sx^1/2 W Sx^1/2`` in white coordinates, has the risk ``M - 2n tr(V S) + n tr(V A V^T)``, which is
    ``L* + n |(V - S A^-1) A^1/2|_F^2`` with ``L* = M - n tr(S A^-1 S)``.

    Examples are exchangeable, so no weighting is better than equal weights.
    """

    task_covariance: Tensor | None = None
    feature_covariance: Tensor | None = None

    def sample(self, shape: tuple[int, ...], n: int, generator: torch.Generator) -> Examples:
        tasks = normal((*shape, self.d), generator)
        x, query = normal((*shape, n, self.d), generator), normal((*shape, self.d), generator)
        if self.task_covariance is not None:
            tasks = tasks @ self._root("tasks", self.task_covariance, tasks)
        if self.feature_covariance is not None:
            factor = self._root("features", self.feature_covariance, x)
            x, query = x @ factor, query @ factor
        return labelled(self, tasks, x, query, generator)

    def _root(self, name: str, covariance: Tensor, like: Tensor) -> Tensor:
        return self.constant((name,), lambda: root(covariance), like)

    @property
    def power(self) -> float:
        return self.white_task_covariance.trace().item() + self.noise

    @property
    def white_task_covariance(self) -> Tensor:
        """S: the covariance of the task in coordinates where features are white."""
        factor = root(self._covariance(self.feature_covariance))
        return factor @ self._covariance(self.task_covariance) @ factor

    def risk_of(self, preconditioner: Tensor, n: int) -> float:
        """The risk of any ``x^T W X^T y``, W ``(d, d)``."""
        V, A = self._white(preconditioner), self._metric(n)
        return (self.power - 2 * n * (V @ self.white_task_covariance).trace() + n * (V @ A @ V.mT).trace()).item()

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        return self._reached(self._best(n), n)

    def low_rank(self, n: int, rank: int) -> Optimum:
        """The best W of that rank: the ``rank`` largest directions of S (Eckart-Young in the metric A)."""
        return self._reached(self._nearest(self._best(n), n, rank), n)

    def adapted(self, n: int, rank: int, source: "Gaussian") -> Optimum:
        """The best W that differs from the optimum of ``source`` by that rank: LoRA after a shift of tasks."""
        start = self._white(source.optimum(n).preconditioner)
        return self._reached(start + self._nearest(self._best(n) - start, n, rank), n)

    def _best(self, n: int) -> Tensor:
        """``S A^-1``; both are functions of S, so they commute."""
        return torch.linalg.solve(self._metric(n), self.white_task_covariance)

    def _nearest(self, V: Tensor, n: int, rank: int) -> Tensor:
        """The matrix of that rank with the least distance to V, ``|(. - V) A^1/2|_F``."""
        factor = root(self._metric(n))
        U, s, Vh = torch.linalg.svd(V @ factor)
        kept = (U[:, :rank] * s[:rank]) @ Vh[:rank]
        return torch.linalg.solve(factor, kept, left=False)

    def _metric(self, n: int) -> Tensor:
        return (n + 1) * self.white_task_covariance + self.power * torch.eye(self.d, dtype=torch.float64)

    def _white(self, W: Tensor) -> Tensor:
        factor = root(self._covariance(self.feature_covariance))
        return factor @ W @ factor

    def _reached(self, V: Tensor, n: int) -> Optimum:
        factor = root(self._covariance(self.feature_covariance))
        W = torch.linalg.solve(factor, torch.linalg.solve(factor, V), left=False)
        return Optimum(self.risk_of(W, n), W, torch.ones(n, dtype=torch.float64))

    def _covariance(self, given: Tensor | None) -> Tensor:
        return torch.eye(self.d, dtype=torch.float64) if given is None else given.double()


def root(covariance: Tensor) -> Tensor:
    """The symmetric square root of a positive definite matrix, fp64."""
    values, vectors = torch.linalg.eigh(covariance.double())
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.mT


def equicorrelated(d: int, correlation: float) -> Tensor:
    """Covariance ``g 1 1^T + (1 - g) I``: one direction that all tasks share."""
    one = torch.ones(d, d, dtype=torch.float64)
    return correlation * one + (1 - correlation) * torch.eye(d, dtype=torch.float64)


def power_law(d: int, exponent: float, seed: int | None = None) -> Tensor:
    """Eigenvalues ``i^-exponent`` scaled to trace d, along the axes or, with a seed, along random directions."""
    values = torch.arange(1, d + 1, dtype=torch.float64) ** -exponent
    values = values * d / values.sum()
    if seed is None:
        return values.diag()
    square = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    basis = torch.linalg.qr(square).Q
    return (basis * values) @ basis.mT
