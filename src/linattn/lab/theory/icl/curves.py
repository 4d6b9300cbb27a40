"""The curves of the figures: data models, and what a model may learn on them."""

from dataclasses import dataclass

from linattn.lab.theory.icl.data import (
    Aligned,
    DataModel,
    Drift,
    Gaussian,
    Optimum,
    Retrieval,
    Weighting,
    equicorrelated,
    power_law,
)


@dataclass(frozen=True, eq=False)
class Curve:
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


def curves(family: str, d: int) -> list[Curve]:
    """The curves of a family's figure."""
    ranks = sorted({max(d // 20, 1), max(d // 5, 2), max(d // 2, 3), d})
    tasks, features = equicorrelated(d, 0.3), power_law(d, 0.5, seed=1)
    # The same eigenvalues along other directions: what was learnt has the right size and the wrong place.
    source, target = (Gaussian(d, task_covariance=power_law(d, 1.0, seed)) for seed in (2, 3))
    found = {
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
    }
    return found[family]


FAMILIES = ("independent", "retrieval", "alignment", "low-rank", "low-rank-update", "drift")
