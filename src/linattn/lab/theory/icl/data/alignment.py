"""Task-feature alignment: all features lean towards the task vector."""

from dataclasses import dataclass
from math import prod

import torch

from linattn.lab.theory.icl.data.base import DataModel, Examples, Optimum, Weighting, labelled, normal, scaled_identity


@dataclass(frozen=True, eq=False)
class Aligned(DataModel):
    """``b ~ N(0, I)``, ``x, x_i | b ~ N(a b, I)``, ``y_i = g b^T x_i + noise``; ``alignment`` is a.

    ``g^2 = 1 / (a^2 d + 1)`` keeps the labels' variance near d. With ``s = |b|^2`` (chi-squared, d degrees) and
    ``q = 1 + a^2 s`` the optimum is ``W = c I``:

        P = g^2 n E[s q^2],  c = P / Q,  L* = g^2 E[s q] + noise - P^2 / Q,
        Q = g^2 (n (n-1) E[s q^3] + n E[s q (q^2 + 4 q + d - 3)]) + noise n E[q^2 + d - 1].

    For small a this is close to independent data with ``n (a^2 d + 1)^2`` examples; the formulas above are exact.
    """

    alignment: float = 0.0

    def sample(self, shape: tuple[int, ...], n: int, generator: torch.Generator) -> Examples:
        tasks = normal((*shape, self.d), generator)
        mean = self.alignment * tasks
        x = normal((*shape, n, self.d), generator) + mean.unsqueeze(-2)
        query = normal((*shape, self.d), generator) + mean
        return labelled(self, self.gain**0.5 * tasks, x, query, generator)

    @property
    def gain(self) -> float:
        """``g^2``."""
        return 1 / (self.alignment**2 * self.d + 1)

    @property
    def power(self) -> float:
        return self.gain * self._mean(1, 1) + self.noise

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        d, gain, mean = self.d, self.gain, self._mean
        cross = gain * n * mean(1, 2)
        same = mean(1, 3) + 4 * mean(1, 2) + (d - 3) * mean(1, 1)
        second = gain * (n * (n - 1) * mean(1, 3) + n * same) + self.noise * n * (mean(0, 2) + d - 1)
        return scaled_identity(self.power - cross**2 / second, cross / second, d, n)

    def _mean(self, i: int, j: int) -> float:
        """``E[s^i q^j]``, by the moments ``E[s^m] = d (d+2) ... (d+2m-2)``."""
        binomial = {0: (1,), 1: (1, 1), 2: (1, 2, 1), 3: (1, 3, 3, 1)}[j]
        moments = (prod(self.d + 2 * k for k in range(i + m)) for m in range(j + 1))
        powers = (self.alignment ** (2 * m) for m in range(j + 1))
        return float(sum(b * p * moment for b, p, moment in zip(binomial, powers, moments, strict=True)))
