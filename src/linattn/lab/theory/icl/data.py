"""Data models: distributions of regression tasks, with the optimum of one layer in closed form (arXiv:2407.10005).

A task has n examples ``(x_i, y_i)`` and a query x, whose answer y is asked for. One layer can do one step of
preconditioned gradient descent, ``f = x^T W sum_i w_i x_i y_i``: linear attention with all ``w_i`` equal, H3 with free
weights, a constant gate with geometric ones. The risk is ``E (y - f)^2``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Weighting = Literal["uniform", "free", "geometric"]
GRID = 4000  # values of a constant gate that are tried: steps of less than 0.001


class Examples(NamedTuple):
    """Examples of tasks: ``x (..., n, d)``, ``y (..., n)``, ``query (..., d)``, ``answer (...)``."""

    x: Tensor
    y: Tensor
    query: Tensor
    answer: Tensor


class Optimum(NamedTuple):
    """The lowest risk, and the predictor ``x^T W sum_i w_i x_i y_i`` that has it: W ``(d, d)``, w ``(n,)``, fp64."""

    risk: float
    preconditioner: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class DataModel(ABC):
    """A distribution of tasks in d dimensions; ``noise`` is the variance of the noise of every label."""

    d: int
    noise: float = 0.0
    _constants: dict[tuple[object, ...], Tensor] = field(default_factory=dict, init=False, repr=False)

    @abstractmethod
    def sample(self, shape: tuple[int, ...], n: int, generator: torch.Generator) -> Examples:
        """Draw tasks in the given shape, on the generator's device, in fp32. Example n is next to the query."""

    @abstractmethod
    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        """The best step with n examples, whose weights are all equal, free, or powers of one number."""

    @property
    @abstractmethod
    def power(self) -> float:
        """``E y^2``: the risk of always answering 0."""

    def constant(self, name: tuple[object, ...], make: Callable[[], Tensor], like: Tensor) -> Tensor:
        """The result of ``make`` on the device of ``like``, computed only once, as tasks are drawn at every step."""
        key = (*name, like.device)
        if key not in self._constants:
            self._constants[key] = make().to(like)
        return self._constants[key]


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def labelled(data: DataModel, tasks: Tensor, x: Tensor, query: Tensor, generator: torch.Generator) -> Examples:
    """``y_i = b^T x_i + noise`` for the task vectors b ``(..., d)``."""
    y, answer = (x * tasks.unsqueeze(-2)).sum(-1), (query * tasks).sum(-1)
    return Examples(x, noisy(data, y, generator), query, noisy(data, answer, generator))


def noisy(data: DataModel, labels: Tensor, generator: torch.Generator) -> Tensor:
    return labels if data.noise == 0 else labels + data.noise**0.5 * normal(labels.shape, generator)


def scaled_identity(risk: float, factor: float, d: int, n: int) -> Optimum:
    """The optimum of a data model that is the same in all directions and does not depend on the examples' order."""
    return Optimum(risk, factor * torch.eye(d, dtype=torch.float64), torch.ones(n, dtype=torch.float64))


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
