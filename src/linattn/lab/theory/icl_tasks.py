"""Data models: distributions of regression tasks, with the optimum of one layer in closed form (arXiv:2407.10005).

A task has n examples ``(x_i, y_i)`` and a query x, whose answer y is asked for. One layer can do one step of
preconditioned gradient descent, ``f = x^T W sum_i w_i x_i y_i``: linear attention with all ``w_i`` equal, H3 with free
weights, a constant gate with geometric ones. The risk is ``E (y - f)^2``.
"""

from dataclasses import dataclass
from functools import cache
from math import comb, prod
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

Weighting = Literal["uniform", "free", "geometric"]
GRID = 4000  # values of a constant gate that are tried: steps of less than 0.001


class Optimum(NamedTuple):
    """The lowest risk, and the predictor ``x^T W sum_i w_i x_i y_i`` that has it: W ``(d, d)``, w ``(n,)``, fp64."""

    risk: float
    preconditioner: Tensor
    weights: Tensor


@dataclass(eq=False)
class DataModel:
    """A distribution of tasks in d dimensions; ``noise`` is the variance of the noise of every label."""

    d: int
    noise: float = 0.0

    def sample(self, shape: tuple[int, ...], n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Draw tasks in the given shape, on the generator's device, in fp32: x ``(..., n+1, d)`` and y ``(..., n+1)``,
        of which the last ones are the query and its answer."""
        raise NotImplementedError

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        """The best step with n examples, whose weights are all equal, free, or powers of one number."""
        raise NotImplementedError

    @property
    def power(self) -> float:
        """``E y^2``: the risk of always answering 0."""
        return self.d + self.noise

    def points(self, shape: tuple[int, ...], n: int, generator: Generator) -> Tensor:
        """Normal examples and a query: ``(..., n+1, d)``."""
        return torch.cat([normal((*shape, rows, self.d), generator) for rows in (n, 1)], -2)

    def labels(self, x: Tensor, tasks: Tensor, generator: Generator) -> Tensor:
        """``y_i = b_i^T x_i + noise`` with b_i ``(..., n+1 or 1, d)``."""
        y = (x * tasks).sum(-1)
        if self.noise:
            more = torch.cat([normal((*y.shape[:-1], rows), generator) for rows in (y.shape[-1] - 1, 1)], -1)
            y = y + self.noise**0.5 * more
        return y

    def by_moments(self, n: int, cross: float, second: float) -> Optimum:
        """Of data that is alike in all directions and orders: ``W = c I``, ``c = P / Q``, ``L* = E y^2 - P^2 / Q`` with
        ``P = E[y h]``, ``Q = E[h^2]`` of ``h = sum_i x^T x_i y_i``."""
        W = cross / second * torch.eye(self.d, dtype=torch.float64)
        return Optimum(self.power - cross**2 / second, W, torch.ones(n, dtype=torch.float64))


def normal(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


@dataclass(eq=False)
class Gaussian(DataModel):
    """``x, x_i ~ N(0, Sx)``, task ``b ~ N(0, Sb)``, ``y_i = b^T x_i + noise``.

    With ``S = Sx^1/2 Sb Sx^1/2``, ``M = tr S + noise`` and ``A = (n+1) S + M I``, a preconditioner W, which is
    ``V = Sx^1/2 W Sx^1/2`` in white coordinates, has the risk ``M - 2n tr(V S) + n tr(V A V^T)``, which is
    ``L* + n |(V - S A^-1) A^1/2|_F^2`` with ``L* = M - n tr(S A^-1 S)``.

    Examples are exchangeable, so no weighting is better than equal weights.
    """

    task_covariance: Tensor | None = None
    feature_covariance: Tensor | None = None

    def __post_init__(self) -> None:
        one = torch.eye(self.d, dtype=torch.float64)
        Sb, Sx = (one if S is None else S.double() for S in (self.task_covariance, self.feature_covariance))
        self.task_root, self.feature_root = root(Sb), root(Sx)
        self.S = self.feature_root @ Sb @ self.feature_root

    def sample(self, shape: tuple[int, ...], n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        tasks, x = normal((*shape, 1, self.d), generator), self.points(shape, n, generator)
        if self.task_covariance is not None:
            tasks = tasks @ self.task_root.to(tasks)
        if self.feature_covariance is not None:
            x = x @ self.feature_root.to(x)
        return x, self.labels(x, tasks, generator)

    @property
    def power(self) -> float:
        return self.S.trace().item() + self.noise

    def risk_of(self, preconditioner: Tensor, n: int) -> float:
        """The risk of any ``x^T W X^T y``, W ``(d, d)``."""
        V, A = self.feature_root @ preconditioner @ self.feature_root, self.metric(n)
        return (self.power - 2 * n * (V @ self.S).trace() + n * (V @ A @ V.mT).trace()).item()

    def metric(self, n: int) -> Tensor:
        """A."""
        return (n + 1) * self.S + self.power * torch.eye(self.d, dtype=torch.float64)

    def optimum(
        self, n: int, weighting: Weighting = "uniform", rank: int | None = None, source: "Gaussian | None" = None
    ) -> Optimum:
        """The best W, of that rank (Eckart-Young in the metric A) or, with a source, the best one that differs from the
        optimum of ``source`` by that rank: LoRA after a shift of tasks."""
        A, factor = self.metric(n), self.feature_root
        V = torch.linalg.solve(A, self.S)  # S A^-1: both are functions of S, so they commute
        if rank is not None:
            start = torch.zeros_like(V) if source is None else factor @ source.optimum(n).preconditioner @ factor
            U, s, Vh = torch.linalg.svd((V - start) @ root(A))
            V = start + torch.linalg.solve(root(A), (U[:, :rank] * s[:rank]) @ Vh[:rank], left=False)
        W = torch.linalg.solve(factor, torch.linalg.solve(factor, V), left=False)
        return Optimum(self.risk_of(W, n), W, torch.ones(n, dtype=torch.float64))


def root(covariance: Tensor) -> Tensor:
    """The symmetric square root of a positive definite matrix, fp64."""
    values, vectors = torch.linalg.eigh(covariance.double())
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.mT


def equicorrelated(d: int, g: float) -> Tensor:
    """Covariance ``g 1 1^T + (1 - g) I``: one direction that all tasks share."""
    return g * torch.ones(d, d, dtype=torch.float64) + (1 - g) * torch.eye(d, dtype=torch.float64)


def power_law(d: int, exponent: float, seed: int | None = None) -> Tensor:
    """Eigenvalues ``i^-exponent`` scaled to trace d, along the axes or, with a seed, along random directions."""
    values = torch.arange(1, d + 1, dtype=torch.float64) ** -exponent
    values = values * d / values.sum()
    if seed is None:
        return values.diag()
    square = torch.randn(d, d, dtype=torch.float64, generator=Generator().manual_seed(seed))
    basis = torch.linalg.qr(square).Q
    return (basis * values) @ basis.mT


@dataclass(eq=False)
class Retrieval(DataModel):
    """``x, b ~ N(0, I)``, ``x_i | x ~ N(a x, (1 - a^2) I)``, ``y_i = b^T x_i + noise``; ``alignment`` is a.

    With ``u = a^2``, ``v = 1 - u`` the moments of :meth:`by_moments` are ``P = n d (1 + u (d+1))`` and Q below. For a
    of order ``d^-1/2`` this is close to independent data with ``n (a^2 d + 1)`` examples; the formulas are exact.
    """

    alignment: float = 0.0

    def sample(self, shape: tuple[int, ...], n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        tasks, query, own = (normal((*shape, rows, self.d), generator) for rows in (1, 1, n))
        x = torch.add(query * self.alignment, own, alpha=(1 - self.alignment**2) ** 0.5)
        x = torch.cat([x, query], -2)
        return x, self.labels(x, tasks, generator)

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        d, u = self.d, self.alignment**2
        v = 1 - u
        cross = n * d * (1 + u * (d + 1))
        same = u * u * (d + 2) * (d + 4) + u * v * (d + 5) * (d + 2) + v * v * (d + 2)
        pairs = u * u * (d + 2) * (d + 4) + 2 * u * v * (d + 2) + v * v
        return self.by_moments(n, cross, n * d * same + n * (n - 1) * d * pairs + self.noise * cross)


@dataclass(eq=False)
class Aligned(DataModel):
    """``b ~ N(0, I)``, ``x, x_i | b ~ N(a b, I)``, ``y_i = g b^T x_i + noise``; ``alignment`` is a.

    ``g^2 = 1 / (a^2 d + 1)`` keeps the labels' variance near d. With ``s = |b|^2`` (chi-squared, d degrees) and
    ``q = 1 + a^2 s`` the moments of :meth:`by_moments` are

        P = g^2 n E[s q^2],  E y^2 = g^2 E[s q] + noise,
        Q = g^2 (n (n-1) E[s q^3] + n E[s q (q^2 + 4 q + d - 3)]) + noise n E[q^2 + d - 1].

    For small a this is close to independent data with ``n (a^2 d + 1)^2`` examples; the formulas above are exact.
    """

    alignment: float = 0.0

    def sample(self, shape: tuple[int, ...], n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        tasks = normal((*shape, 1, self.d), generator)
        x = self.points(shape, n, generator) + self.alignment * tasks
        return x, self.labels(x, self.gain**0.5 * tasks, generator)

    @property
    def gain(self) -> float:
        """``g^2``."""
        return 1 / (self.alignment**2 * self.d + 1)

    @property
    def power(self) -> float:
        return self.gain * self._mean(1, 1) + self.noise

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        d, gain, mean = self.d, self.gain, self._mean
        same = mean(1, 3) + 4 * mean(1, 2) + (d - 3) * mean(1, 1)
        second = gain * (n * (n - 1) * mean(1, 3) + n * same) + self.noise * n * (mean(0, 2) + d - 1)
        return self.by_moments(n, gain * n * mean(1, 2), second)

    def _mean(self, i: int, j: int) -> float:
        """``E[s^i q^j]``, by the moments ``E[s^m] = d (d+2) ... (d+2m-2)``."""
        moments = [prod(self.d + 2 * k for k in range(i + m)) for m in range(j + 1)]
        return float(sum(comb(j, m) * self.alignment ** (2 * m) * moment for m, moment in enumerate(moments)))


@dataclass(eq=False)
class Drift(DataModel):
    """``x, x_i ~ N(0, I)``, ``y_i = b_i^T x_i + noise`` with ``E[b_i b_j^T] = rho^|i-j| I``; ``memory`` is rho.

    With the correlations r of the examples' tasks with the query's, R of the examples' tasks with each other, and
    ``K = R + (d + 1 + noise) I``, weights w and ``W = I`` have the risk ``d + noise - 2 d w^T r + d w^T K w``:

        free:     w* = K^-1 r,  L* = d + noise - d r^T K^-1 r         (H3)
        along u:  w* = u (u^T r) / (u^T K u),  L* = d + noise - d (u^T r)^2 / (u^T K u)

    with ``u = 1`` for linear attention and the best ``u_i = g^(n+1-i)`` for a gate that does not depend on the data.
    """

    memory: float = 1.0

    def sample(self, shape: tuple[int, ...], n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x = self.points(shape, n, generator)
        white = normal((*shape, n + 1, self.d), generator)
        return x, self.labels(x, factor_of_drift(self.memory, n).to(white) @ white, generator)

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        whole = correlations(self.memory, n)
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


def correlations(memory: float, n: int) -> Tensor:
    """Correlations of drifting tasks, ``(n+1, n+1)``, with the query's task last."""
    place = torch.arange(n + 1, dtype=torch.float64)
    return torch.tensor(memory, dtype=torch.float64) ** (place - place.unsqueeze(1)).abs()


@cache
def factor_of_drift(memory: float, n: int) -> Tensor:
    """A square root of the correlations, by eigenvectors: the matrix is singular for tasks that never change."""
    values, vectors = torch.linalg.eigh(correlations(memory, n))
    return vectors * values.clamp(min=0).sqrt()


class Curve(NamedTuple):
    """A line of a figure: tasks of ``data``. With a ``rank``, attention has that rank; with a ``source`` as well, it is
    an update of that rank to a model that was trained on ``source``."""

    label: str
    data: DataModel
    rank: int | None = None
    source: Gaussian | None = None

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        if isinstance(self.data, Gaussian):
            return self.data.optimum(n, weighting, self.rank, self.source)
        return self.data.optimum(n, weighting)


FAMILIES = ("independent", "retrieval", "alignment", "low-rank", "low-rank-update", "drift")


def curves(family: str, d: int) -> list[Curve]:
    """The curves of a family's figure."""
    ranks = sorted({max(d // 20, 1), max(d // 5, 2), max(d // 2, 3), d})
    tasks, features = equicorrelated(d, 0.3), power_law(d, 0.5, seed=1)
    # The same eigenvalues along other directions: what was learnt has the right size and the wrong place.
    source, target = (Gaussian(d, task_covariance=power_law(d, 1.0, seed)) for seed in (2, 3))
    return {
        "independent": [
            Curve("isotropic", Gaussian(d)),
            Curve("noisy labels", Gaussian(d, noise=d / 4)),
            Curve("tasks correlated", Gaussian(d, task_covariance=equicorrelated(d, 0.5))),
            Curve("both covariances", Gaussian(d, d / 20, task_covariance=tasks, feature_covariance=features)),
        ],
        "retrieval": [Curve(f"a = {a:g}", Retrieval(d, alignment=a)) for a in (0.0, 0.2, 0.4, 0.6)],
        "alignment": [Curve(f"a = {a:g}", Aligned(d, alignment=a)) for a in (0.0, 0.2, 0.4, 0.6)],
        "low-rank": [Curve(f"rank {r}", Gaussian(d, task_covariance=power_law(d, 1.0)), rank=r) for r in ranks],
        "low-rank-update": [Curve(f"rank {r}", target, rank=r, source=source) for r in (0, *ranks)],
        "drift": [Curve(f"memory {rho:g}", Drift(d, memory=rho)) for rho in (1.0, 0.95, 0.8)],
    }[family]
