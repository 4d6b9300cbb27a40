"""Retrieval: the examples were looked up for the query, so their features are near it."""

from dataclasses import dataclass

import torch

from linattn.lab.theory.icl.data.base import DataModel, Examples, Optimum, Weighting, labelled, normal, scaled_identity


@dataclass(frozen=True, eq=False)
class Retrieval(DataModel):
    """``x, b ~ N(0, I)``, ``x_i | x ~ N(a x, (1 - a^2) I)``, ``y_i = b^T x_i + noise``; ``alignment`` is a.

    All directions are alike, so the optimum is ``W = c I``. With ``u = a^2``, ``v = 1 - u`` and
    ``h = sum_i x^T x_i y_i``, whose moments are ``P = E[y h] = n d (1 + u (d+1))`` and ``Q = E[h^2]``, the optimum has
    ``c = P / Q`` and ``L* = d + noise - P^2 / Q``. For a of order ``d^-1/2`` this is close to independent data with
    ``n (a^2 d + 1)`` examples; the formulas above are exact.
    """

    alignment: float = 0.0

    def sample(self, shape: tuple[int, ...], n: int, generator: torch.Generator) -> Examples:
        tasks, query = normal((*shape, self.d), generator), normal((*shape, self.d), generator)
        own = normal((*shape, n, self.d), generator)
        x = torch.add(query.unsqueeze(-2) * self.alignment, own, alpha=(1 - self.alignment**2) ** 0.5)
        return labelled(self, tasks, x, query, generator)

    @property
    def power(self) -> float:
        return self.d + self.noise

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        d, u = self.d, self.alignment**2
        v = 1 - u
        cross = n * d * (1 + u * (d + 1))
        same = u * u * (d + 2) * (d + 4) + u * v * (d + 5) * (d + 2) + v * v * (d + 2)
        pairs = u * u * (d + 2) * (d + 4) + 2 * u * v * (d + 2) + v * v
        second = n * d * same + n * (n - 1) * d * pairs + self.noise * cross
        return scaled_identity(self.power - cross**2 / second, cross / second, d, n)
