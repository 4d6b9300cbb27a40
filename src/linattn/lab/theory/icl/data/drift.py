"""Drifting tasks: older examples say less about the task that is asked for, so weighting them pays."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.lab.theory.icl.data.base import DataModel, Examples, Optimum, Weighting, noisy, normal

GRID = 4000  # values of a constant gate that are tried: steps of less than 0.001


@dataclass(frozen=True, eq=False)
class Drift(DataModel):
    """``x, x_i ~ N(0, I)``, ``y_i = b_i^T x_i + noise`` with ``E[b_i b_j^T] = rho^|i-j| I``; ``memory`` is rho.

    With the correlations r of the examples' tasks with the query's, R of the examples' tasks with each other, and
    ``K = R + (d + 1 + noise) I``, weights w and ``W = I`` have the risk ``d + noise - 2 d w^T r + d w^T K w``:

        free:     w* = K^-1 r,  L* = d + noise - d r^T K^-1 r         (H3)
        along u:  w* = u (u^T r) / (u^T K u),  L* = d + noise - d (u^T r)^2 / (u^T K u)

    with ``u = 1`` for linear attention and the best ``u_i = g^(n+1-i)`` for a gate that does not depend on the data.
    """

    memory: float = 1.0

    def sample(self, shape: tuple[int, ...], n: int, generator: torch.Generator) -> Examples:
        x, query = normal((*shape, n, self.d), generator), normal((*shape, self.d), generator)
        white = normal((*shape, n + 1, self.d), generator)
        tasks = self.constant(("factor", n), lambda: self._factor(n), white) @ white
        y, answer = (x * tasks[..., :-1, :]).sum(-1), (query * tasks[..., -1, :]).sum(-1)
        return Examples(x, noisy(self, y, generator), query, noisy(self, answer, generator))

    @property
    def power(self) -> float:
        return self.d + self.noise

    def correlations(self, n: int) -> Tensor:
        """Correlations of the tasks, ``(n+1, n+1)``, with the query's task last."""
        place = torch.arange(n + 1, dtype=torch.float64)
        return torch.tensor(self.memory, dtype=torch.float64) ** (place - place.unsqueeze(1)).abs()

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        whole = self.correlations(n)
        r, K = whole[-1, :-1], whole[:-1, :-1] + (self.d + 1 + self.noise) * torch.eye(n, dtype=torch.float64)
        if weighting == "free":
            directions = torch.linalg.solve(K, r).unsqueeze(0)
        elif weighting == "uniform":
            directions = torch.ones(1, n, dtype=torch.float64)
        else:
            gates = torch.linspace(0, 1, GRID + 1, dtype=torch.float64)[1:]
            directions = gates.unsqueeze(1) ** torch.arange(n, 0, -1, dtype=torch.float64)
        gains = (directions @ r) ** 2 / ((directions @ K) * directions).sum(1)
        u = directions[gains.argmax()]
        weights = u * (u @ r) / (u @ K @ u)
        return Optimum(self.power - self.d * gains.max().item(), torch.eye(self.d, dtype=torch.float64), weights)

    def _factor(self, n: int) -> Tensor:
        """A square root of the correlations, by eigenvectors: the matrix is singular for tasks that never change."""
        values, vectors = torch.linalg.eigh(self.correlations(n))
        return vectors * values.clamp(min=0).sqrt()
