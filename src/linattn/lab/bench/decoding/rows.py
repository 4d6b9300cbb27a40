"""Rows of a decoding benchmark, and what is derived from them."""

from dataclasses import asdict, dataclass
from typing import Any

from linattn.lab.bench.language.rows import Crossover, LanguageResult, LanguageRow, find_crossover
from linattn.lab.bench.models.cases import SOFTMAX


@dataclass
class DecodingRow(LanguageRow):
    """One token for every sequence of a batch after a context: its time, and the memory of the state and in all."""

    context: int = 0
    batch: int = 1
    mode: str = ""
    state_bytes: int | None = None  # of all layers and sequences, after the context
    weight_bytes: int | None = None
    peak_bytes: int | None = None  # the most that a step allocates beyond weights and states
    prefill_seconds: float | None = None  # of one sequence, from the context before this one

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.mechanism, self.context, self.batch, self.mode

    @property
    def total_bytes(self) -> int | None:
        """The memory that decoding needs: weights, states and a step."""
        parts = (self.state_bytes, self.weight_bytes, self.peak_bytes)
        return None if None in parts else sum(part for part in parts if part is not None)


class DecodingResult(LanguageResult[DecodingRow]):
    """All results of one run, or of several that resumed each other."""

    def series(self, mechanism: str, batch: int, mode: str) -> list[DecodingRow]:
        """The rows that count, by context."""
        own = [r for r in self.rows if (r.mechanism, r.batch, r.mode, r.status) == (mechanism, batch, mode, "ok")]
        return sorted(own, key=lambda row: row.context)

    def times(self, mechanism: str, batch: int, mode: str) -> dict[int, float]:
        """Milliseconds per token, by context."""
        return {r.context: r.median_ms for r in self.series(mechanism, batch, mode) if r.median_ms is not None}

    def settings(self) -> list[tuple[int, str]]:
        """Batch sizes and modes that have rows, in the order in which they came."""
        return list(dict.fromkeys((row.batch, row.mode) for row in self.rows if row.status != "absent"))

    def crossovers(self) -> list[Crossover]:
        """Crossovers for each mechanism, batch size and mode."""
        found = []
        for batch, mode in self.settings():
            softmax = self.times(SOFTMAX, batch, mode)
            for name in self.mechanisms():
                if name != SOFTMAX:
                    own = find_crossover(name, f"batch {batch}, {mode}", softmax, self.times(name, batch, mode))
                    found += [own] if own is not None else []
        return found

    def growth(self) -> list[dict[str, Any]]:
        """Time, state and memory of each line at its longest context over those at its shortest: how flat it is."""
        found = []
        for batch, mode in self.settings():
            for name in self.mechanisms():
                rows = self.series(name, batch, mode)
                if len(rows) > 1:
                    numbers = {"time": "median_ms", "state": "state_bytes", "memory": "total_bytes"}
                    ratios = {k: getattr(rows[-1], v) / getattr(rows[0], v) for k, v in numbers.items()}
                    between = {"contexts": [rows[0].context, rows[-1].context]}
                    found.append({"mechanism": name, "batch": batch, "mode": mode, **between, **ratios})
        return found

    def derived(self) -> dict[str, Any]:
        return {"crossovers": [asdict(c) for c in self.crossovers()], "growth": self.growth()}

    def as_json(self) -> dict[str, Any]:
        value = super().as_json()
        for written, row in zip(value["rows"], self.rows, strict=True):
            written["total_bytes"] = row.total_bytes
        return value
