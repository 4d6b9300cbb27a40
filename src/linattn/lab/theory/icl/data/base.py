"""Base of data models: a distribution of regression tasks, with the optimum of one layer in closed form.

A task has n examples ``(x_i, y_i)`` and a query x, whose answer y is asked for. One layer can do one step of
preconditioned gradient descent, ``f = x^T W sum_i w_i x_i y_i``: linear attention with all ``w_i`` equal, H3 with free
weights, a constant gate with geometric ones. The risk is ``E (y - f)^2``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Weighting = Literal["uniform", "free", "geometric"]


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
