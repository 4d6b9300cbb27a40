"""Cases: each curve of a figure, defined by a data model and by what the model may learn on it."""

from collections.abc import Callable
from dataclasses import dataclass

from linattn.lab.theory.icl.data.alignment import Aligned
from linattn.lab.theory.icl.data.base import DataModel, Optimum, Weighting
from linattn.lab.theory.icl.data.drift import Drift
from linattn.lab.theory.icl.data.gaussian import Gaussian, equicorrelated, power_law
from linattn.lab.theory.icl.data.retrieval import Retrieval


@dataclass(frozen=True, eq=False)
class Case:
    """Tasks of ``data``. With a ``rank``, attention has that rank; with a ``source`` as well, it is an update of that
    rank to a model that was trained on ``source``."""

    label: str
    data: DataModel
    rank: int | None = None
    source: DataModel | None = None

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        if self.rank is None:
            return self.data.optimum(n, weighting)
        if not isinstance(self.data, Gaussian) or not isinstance(self.source, Gaussian | None):
            raise TypeError(f"a rank needs independent examples, got {type(self.data).__name__}")
        if self.source is None:
            return self.data.low_rank(n, self.rank)
        return self.data.adapted(n, self.rank, self.source)


def independent(d: int) -> list[Case]:
    return [
        Case("isotropic", Gaussian(d)),
        Case("noisy labels", Gaussian(d, noise=d / 4)),
        Case("tasks correlated", Gaussian(d, task_covariance=equicorrelated(d, 0.5))),
        Case(
            "both covariances",
            Gaussian(d, d / 20, task_covariance=equicorrelated(d, 0.3), feature_covariance=power_law(d, 0.5, seed=1)),
        ),
    ]


def retrieval(d: int) -> list[Case]:
    return [Case(f"a = {a:g}", Retrieval(d, alignment=a)) for a in (0.0, 0.2, 0.4, 0.6)]


def alignment(d: int) -> list[Case]:
    return [Case(f"a = {a:g}", Aligned(d, alignment=a)) for a in (0.0, 0.2, 0.4, 0.6)]


def low_rank(d: int) -> list[Case]:
    data = Gaussian(d, task_covariance=power_law(d, 1.0))
    return [Case(f"rank {r}", data, rank=r) for r in _ranks(d)]


def low_rank_update(d: int) -> list[Case]:
    """The same eigenvalues along other directions: what was learnt has the right size and the wrong place."""
    source, data = (Gaussian(d, task_covariance=power_law(d, 1.0, seed)) for seed in (2, 3))
    return [Case(f"rank {r}", data, rank=r, source=source) for r in (0, *_ranks(d))]


def drift(d: int) -> list[Case]:
    return [Case(f"memory {rho:g}", Drift(d, memory=rho)) for rho in (1.0, 0.95, 0.8)]


def _ranks(d: int) -> list[int]:
    return sorted({max(d // 20, 1), max(d // 5, 2), max(d // 2, 3), d})


FAMILIES: dict[str, Callable[[int], list[Case]]] = {
    "independent": independent,
    "retrieval": retrieval,
    "alignment": alignment,
    "low-rank": low_rank,
    "low-rank-update": low_rank_update,
    "drift": drift,
}

TITLES = {
    "independent": "Independent examples",
    "retrieval": "Retrieved examples: features lean towards the query",
    "alignment": "Aligned examples: features lean towards the task",
    "low-rank": "Attention of low rank",
    "low-rank-update": "Low-rank updates (LoRA) after a shift of tasks",
    "drift": "Drifting tasks",
}
