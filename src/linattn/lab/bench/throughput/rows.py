"""Rows of a benchmark of training throughput, and what is derived from them."""

from dataclasses import asdict, dataclass
from typing import Any

from linattn.lab.bench.language.rows import Crossover, LanguageResult, LanguageRow, find_crossover
from linattn.lab.bench.models.cases import SOFTMAX


@dataclass
class ThroughputRow(LanguageRow):
    """A training step at one length: forward, loss, backward and the optimiser's step."""

    length: int = 0
    batch: int = 1
    parameters: int | None = None
    first_seconds: float | None = None  # the first step: compilation
    peak_bytes: int | None = None  # the most that a step allocates beyond weights and the optimiser's memory

    @property
    def key(self) -> tuple[str, int]:
        return self.mechanism, self.length


class ThroughputResult(LanguageResult[ThroughputRow]):
    """All results of one run, or of several that resumed each other."""

    def series(self, mechanism: str) -> list[ThroughputRow]:
        """The rows that count, by length."""
        own = [row for row in self.rows if (row.mechanism, row.status) == (mechanism, "ok")]
        return sorted(own, key=lambda row: row.length)

    def times(self, mechanism: str) -> dict[int, float]:
        """Milliseconds of a step by length; all steps have equally many tokens."""
        return {row.length: row.median_ms for row in self.series(mechanism) if row.median_ms is not None}

    def crossovers(self) -> list[Crossover]:
        softmax = self.times(SOFTMAX)
        found = [find_crossover(m, "training", softmax, self.times(m)) for m in self.mechanisms() if m != SOFTMAX]
        return [own for own in found if own is not None]

    def derived(self) -> dict[str, Any]:
        return {"crossovers": [asdict(c) for c in self.crossovers()]}
