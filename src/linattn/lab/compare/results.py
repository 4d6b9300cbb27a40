"""The results of a comparison, for ``results.json``."""

from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from linattn.lab.compare.cells import CellResult
from linattn.lab.compare.subject import Comparing, Subject
from linattn.lab.page.style import REFERENCE
from linattn.support.files import write_json


@dataclass
class Results:
    """Results, which are filled while a comparison runs; :meth:`save` writes the current ones."""

    config: Comparing
    subject: Subject
    meta: dict[str, Any]
    swept: list[CellResult] = field(default_factory=list)
    final: list[CellResult] = field(default_factory=list)
    lrs: dict[str, float] = field(default_factory=dict)
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)
    attention: dict[str, dict[str, Any]] = field(default_factory=dict)
    finished: bool = False

    def save(self) -> None:
        write_json(self.config.output / "results.json", self.as_json())

    def as_json(self) -> dict[str, Any]:
        return {
            "meta": {**self.meta, "finished": self.finished},
            "mechanisms": [self._mechanism(name) for name in self.config.mechanisms],
            "rows": [result.as_row(self.subject.metric.field) for result in self.final],
        }

    def _mechanism(self, name: str) -> dict[str, Any]:
        runs = [r for r in self.final if r.cell.mechanism == name]
        tried = [r for r in self.swept if r.cell.mechanism == name]
        own, reference = self.attention.get(name), self.attention.get(REFERENCE)
        gap = {"entropy_gap": own["entropy"] - reference["entropy"] if own and reference else None}
        field = self.subject.metric.field
        return {
            "mechanism": name,
            **self.subject.details(name),
            "lr": self.lrs.get(name),
            "lr_edge": edge(self.lrs.get(name), [r.cell.lr for r in tried]),
            "sweep": [{"lr": r.cell.lr, field: r.score, "train_seconds": r.train_seconds} for r in tried] or None,
            **spread([r.score for r in runs if r.score is not None], field),
            **further([r.more or {} for r in runs]),
            "train_seconds_mean": mean_or_none([r.train_seconds for r in runs if r.train_seconds is not None]),
            **self.costs.get(name, {}),
            **(own or {}),
            **gap,
        }


def edge(lr: float | None, tried: list[float]) -> str | None:
    """Which end of the tried learning rates the best one is, as a better one may lie beyond; None if it is inside.

    Also None for fewer than three rates, as all of them are ends.

    Example:
        >>> edge(0.01, [0.001, 0.003, 0.01]), edge(0.003, [0.001, 0.003, 0.01]), edge(0.003, [0.001, 0.003])
        ('highest', None, None)
    """
    if len(tried) < 3 or lr not in (min(tried), max(tried)):
        return None
    return "highest" if lr == max(tried) else "lowest"


def spread(scores: list[float], field: str = "top1") -> dict[str, Any]:
    """Mean, sample standard deviation (None for one run), smallest and largest score."""
    return {
        f"{field}_mean": mean_or_none(scores),
        f"{field}_std": stdev(scores) if len(scores) > 1 else None,
        f"{field}_min": min(scores, default=None),
        f"{field}_max": max(scores, default=None),
        "runs": len(scores),
    }


def further(found: list[dict[str, Any]]) -> dict[str, float | None]:
    """Mean and sample standard deviation of further numbers of runs, by name."""
    means: dict[str, float | None] = {}
    for name in dict.fromkeys(name for more in found for name, value in more.items() if isinstance(value, float)):
        values = [more[name] for more in found if name in more]
        means |= {f"{name}_mean": mean(values), f"{name}_std": stdev(values) if len(values) > 1 else None}
    return means


def mean_or_none(values: list[float]) -> float | None:
    return mean(values) if values else None
