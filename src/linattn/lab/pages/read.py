"""Reads the results of a comparison; any field may still be missing."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from linattn.lab.page.style import REFERENCE
from linattn.lab.pages.metric import Metric, Words
from linattn.support.options import OptionError, options_words

QUADRATIC = (REFERENCE, "zeros_softmax")


@dataclass(frozen=True)
class Accuracy:
    """The metric over the finished runs of one mechanism; ``std`` is None for a single run."""

    mean: float
    std: float | None
    low: float
    high: float
    runs: int

    def overlaps(self, other: "Accuracy") -> bool:
        return self.low <= other.high and other.low <= self.high


class Comparison:
    """``results.json``, with names for what the report asks of it.

    Example:
        >>> rows = [{"mechanism": "relu", "seed": s, "status": "done", "top1": 90.0 + s} for s in (0, 2)]
        >>> Comparison({"rows": rows}).accuracy("relu")
        Accuracy(mean=91.0, std=1.4142135623730951, low=90.0, high=92.0, runs=2)
    """

    def __init__(self, results: Mapping[str, Any]) -> None:
        self.meta: dict[str, Any] = results.get("meta") or {}
        self.rows: list[dict[str, Any]] = results.get("rows") or []
        self.metric, self.words = Metric.of(self.meta), Words.of(self.meta)
        self._entries = {entry["mechanism"]: entry for entry in results.get("mechanisms") or []}
        # Mechanisms whose runs are not finished have only rows.
        self.names: list[str] = list(dict.fromkeys([*self._entries, *(row["mechanism"] for row in self.rows)]))

    @property
    def finished(self) -> bool:
        return bool(self.meta.get("finished", not any(row.get("status") == "waiting" for row in self.rows)))

    @property
    def linear_names(self) -> list[str]:
        return [name for name in self.names if not self.is_reference(name)]

    def is_reference(self, name: str) -> bool:
        """Whether this is softmax, whatever the width of its host, with or without Canon layers."""
        return (self.entry(name).get("pattern") or name) == REFERENCE

    def are_linear(self, names: Iterable[str]) -> bool:
        """Whether no layer of these is quadratic; a hybrid is named by its layers, ``gated*3/softmax``."""
        layers = (part for name in names for part in (self.entry(name).get("pattern") or name).split("/"))
        return all(part.partition("*")[0] not in QUADRATIC for part in layers)

    @property
    def widths(self) -> dict[str, list[str]]:
        """Names by the width of their host, or all under the empty text if all hosts have the same width."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            width = self.entry(name).get("width")
            found.setdefault("" if width is None else str(width), []).append(name)
        return found if len(found) > 1 else {"": self.names}

    def entry(self, name: str) -> dict[str, Any]:
        return self._entries.get(name, {})

    def options(self, name: str) -> str:
        """The mechanism's options as they are typed; graph models have recipes instead."""
        return "" if self.meta.get("kind") == "graph" else options_words(self.entry(name).get("options") or {})

    def value(self, name: str, field: str) -> float | None:
        return number(self.entry(name).get(field))

    def part(self, name: str) -> dict[str, Any]:
        """A part of ``meta`` such as ``data``, ``host`` or ``train``."""
        return self.meta.get(name) or {}

    def runs(self, name: str | None = None, status: str | None = None) -> list[dict[str, Any]]:
        return [
            row
            for row in self.rows
            if name in (None, row["mechanism"]) and status in (None, row.get("status", "waiting"))
        ]

    def accuracy(self, name: str) -> Accuracy | None:
        """The accuracy that the comparison wrote or, until it has, that of the finished runs."""
        field = self.metric.field
        values = [score for row in self.runs(name, "done") if (score := number(row.get(field))) is not None]
        written = self.value(name, f"{field}_mean")
        if written is None and not values:
            return None
        centre = mean(values) if written is None else written
        spread = stdev(values) if written is None and len(values) > 1 else self.value(name, f"{field}_std")
        low, high = self.value(name, f"{field}_min"), self.value(name, f"{field}_max")
        runs = self.value(name, "runs")
        return Accuracy(
            centre,
            spread,
            min(values, default=centre) if low is None else low,
            max(values, default=centre) if high is None else high,
            int(runs) if runs else len(values),
        )

    def layers(self, name: str) -> list[dict[str, Any]]:
        return self.entry(name).get("layers") or []


def number(value: object) -> float | None:
    """A finite number, or None: JSON has no NaN, so a diverged loss is written as text."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return value


def head_mean(values: object) -> float | None:
    """The mean over heads of one statistic of a layer; heads without a value are left out."""
    found = [n for n in map(number, values if isinstance(values, list) else [values]) if n is not None]
    return mean(found) if found else None


def load_results(folder: Path) -> dict[str, Any]:
    """Read ``results.json`` from a comparison's folder."""
    path = folder / "results.json"
    if not path.is_file():
        raise OptionError("folder", f"must hold the results.json of a comparison; there is none in {folder}")
    results = _load(path)
    if not isinstance(results, dict) or not {"meta", "mechanisms", "rows"} <= results.keys():
        raise OptionError("folder", f"{path} is not the result of a comparison: it needs meta, mechanisms and rows")
    return results


def load_examples(folder: Path) -> dict[str, Any] | None:
    """Read the attention maps from ``examples.json`` in the same folder; None if there is none."""
    path = folder / "examples.json"
    return _load(path) if path.is_file() else None


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError("folder", f"{path} is not JSON: {error}") from error
