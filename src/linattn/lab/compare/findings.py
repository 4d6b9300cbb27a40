"""What the rows of a comparison say: scores and what they show, costs, the table of mechanisms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from linattn.lab.page import Cell
from linattn.lab.page.numbers import BINARY, PREFIXES, Prefixes, Unit, common_unit, listed
from linattn.lab.page.plots import REFERENCE
from linattn.lab.statistics import LEAST_SEEDS, Difference, Row, Verdicts, compare_runs
from linattn.support.options import options_words

MIB = Unit(2**20, "Mi", 1)
BUSY = 0.15  # share of the machine's cores that other work may take unnamed


@dataclass(frozen=True)
class Metric:
    """The score of a run, and the words for what models are trained on.

    Example:
        >>> Metric().text(97.3), Metric("bits per byte", "", 3, higher=False).text(1.25)
        ('97.30 %', '1.250')
    """

    name: str = "top-1"
    unit: str = "%"
    decimals: int = 2
    higher: bool = True
    counted: str = "image"
    """What speeds and costs count: ``image`` or ``token``."""
    round: str = "epoch"
    """What training counts."""

    def number(self, value: float) -> str:
        return f"{value:.{self.decimals}f}"

    def text(self, value: float) -> str:
        return f"{self.number(value)} {self.unit}".strip()

    @property
    def title(self) -> str:
        """The metric at the head of a chart."""
        return self.name[0].upper() + self.name[1:]

    @property
    def axis(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def best(self, values: Mapping[Any, float]) -> Any:
        """The key of the best value; among equals the first."""
        return (max if self.higher else min)(values, key=lambda key: values[key])


class Column(NamedTuple):
    """A column of the table of mechanisms: cells by name."""

    title: str
    unit: str
    cells: dict[str, Cell]


class Findings:
    """The rows of a comparison, with names for what its page asks of them.

    Example:
        >>> rows = [{"kind": "run", "mechanism": "relu", "seed": seed, "score": 90.0 + seed} for seed in (0, 2)]
        >>> Findings({}, rows).score("relu").mean
        91.0
    """

    def __init__(self, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        self.meta, self.rows, self.metric = meta, rows, Metric(**(meta.get("metric") or {}))
        self.names = list(dict.fromkeys(row["mechanism"] for row in rows if row["kind"] in ("sweep", "run", "cost")))

    def of(self, kind: str, name: str | None = None) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind and name in (None, row["mechanism"])]

    def field(self, name: str, field: str) -> Any:
        """A value of a mechanism's rows of costs, attention or runs; None where it was not measured."""
        rows = [*self.of("cost", name), *self.of("attention", name), *self.of("run", name)]
        return next((row[field] for row in rows if row.get(field) is not None), None)

    # Scores.

    @cached_property
    def verdicts(self) -> dict[str, Verdicts]:
        """What the scores show, by the width of the host, or under the empty text where all have the same."""
        groups: dict[str, dict[str, dict[int, float]]] = {}
        for row in self.of("run"):
            if isinstance(row.get("score"), int | float) and isfinite(row["score"]):
                name = row["mechanism"]
                group = groups.setdefault(str(self.field(name, "width") or ""), {})
                group.setdefault(name, {})[row["seed"]] = row["score"]
        margin, unit = self.meta.get("config", {}).get("margin"), f" {self.metric.unit}".rstrip()
        found = {}
        for width, group in groups.items():
            # Softmax, whatever the width of its host, with or without Canon layers.
            reference = (name for name in group if (self.field(name, "pattern") or name) == REFERENCE)
            found[width] = compare_runs(group, next(reference, ""), self.metric.higher, margin, unit)
        return found

    def score(self, name: str) -> Row | None:
        """The scores of a mechanism with its differences to others; None without a finished run."""
        return next((row for found in self.verdicts.values() for row in found.rows if row.name == name), None)

    @property
    def sentences(self) -> list[str]:
        """What is shown, what is missing, and what may be doubted."""
        said, runs = [], self.of("run")
        if failed := sum(bool(row.get("error")) for row in runs):
            said.append(f"{failed} of {len(runs)} runs failed and are left out.")
        for width, found in self.verdicts.items():
            best = next(row for row in found.rows if row.name == found.best)
            score = f"{self.metric.text(best.mean)} over {best.seeds} seed{'' if best.seeds == 1 else 's'}"
            start = f"At width {width}: " if len(self.verdicts) > 1 else ""
            said += [f"{start}{found.best} has the best mean {self.metric.name}, {score}.", *found.sentences]
        scores = [row for found in self.verdicts.values() for row in found.rows]
        if any(row.seeds < LEAST_SEEDS for row in scores) and len(self.names) > 1:
            more = f"run the same command with --seeds {LEAST_SEEDS}"
            said.append(f"For {LEAST_SEEDS} seeds, of which those of this run are taken, {more}.")
        edges = [f"{name} ({edge})" for name in self.names if (edge := self._edge(name))]
        if edges:
            start = "At the edge of the learning rates that were tried, so that a better one may lie beyond: "
            said.append(f"{start}{listed(edges)}.")
        busy = max((row.get("busy") or 0.0 for row in self.of("cost")), default=0.0)
        if busy > BUSY:
            said.append(f"Other work took {100 * busy:.0f} % of the machine while speed was measured.")
        return said

    def _edge(self, name: str) -> str:
        """Whether a learning rate is the lowest or highest of three or more."""
        tried, lr = {row["lr"] for row in self.of("sweep", name)}, self.field(name, "lr")
        if len(tried) < 3 or lr not in (min(tried), max(tried)):
            return ""
        return f"{'highest' if lr == max(tried) else 'lowest'}, {lr:g}"

    # Costs and attention.

    def spread(self, name: str, field: str) -> tuple[float, float, float] | None:
        """Median, least and greatest of what was measured, once or several times."""
        found = self.field(name, field)
        values = found if isinstance(found, list) else [] if found is None else [found]
        return (median(values), min(values), max(values)) if values else None

    def series(self, name: str) -> str:
        """The name of a mechanism without the width of its host."""
        return str(self.field(name, "series") or name)

    def layers(self, name: str) -> list[Mapping[str, Any]]:
        return self.field(name, "layers") or []

    def options(self, name: str) -> str:
        """The options of a mechanism as they are typed."""
        return options_words(self.field(name, "options") or {})

    # Tables.

    def columns(self) -> list[Column]:
        """The table of mechanisms; columns without any value are left out."""
        one, column, numbers = self.metric.counted, self._column, self._numbers
        found = [
            column(self.metric.name, f"{self.metric.unit}, mean ± std".lstrip(", "), self._score),
            column("to softmax", "95 % interval", lambda name: self._difference(name, "to_reference")),
        ]
        if any(verdicts.best != verdicts.reference for verdicts in self.verdicts.values()):
            found.append(column("to the best", "95 % interval", lambda name: self._difference(name, "to_best")))
        found += [
            column("before", self.metric.unit, lambda name: self._mean(name, "before")),
            column("converted", self.metric.unit, lambda name: self._mean(name, "converted")),
            numbers("parameters", "parameters", ""),
            numbers("operations", "flops", f"FLOPs/{one}"),
            numbers("state", "state_size", " per layer"),
            numbers("state", "state_bytes", "B per sequence", prefixes=BINARY),
            numbers("forward", f"{one}s_per_second_forward", f" {one}s/s"),
            numbers("training", f"{one}s_per_second_train", f" {one}s/s"),
            numbers("peak memory", "peak_bytes_train", "B", unit=MIB),
            column("entropy gap", "nats", self._gap),
        ]
        return [column for column in found if column.cells]

    def short_table(self) -> tuple[list[str], list[list[object]]]:
        """The table for a screen: titles and rows, without the spread of speeds."""
        left_out = ("to the best", "operations", "entropy gap", "forward", "state")
        columns = [column for column in self.columns() if column.title not in left_out]
        rows: list[list[object]] = [
            [f"{name}\n{self.options(name)}".strip(), *(column.cells.get(name, "") for column in columns)]
            for name in self.names
        ]
        return ["mechanism", *(f"{column.title}\n{column.unit}".strip() for column in columns)], rows

    def _column(self, title: str, unit: str, cell: Callable[[str], Cell | None]) -> Column:
        return Column(title, unit, {name: found for name in self.names if (found := cell(name))})

    def _score(self, name: str) -> Cell | None:
        row, number = self.score(name), self.metric.number
        if row is None:
            return None
        seeds = f"{number(row.least)} to {number(row.greatest)}, {row.seeds} seeds" if row.seeds > 1 else "1 seed"
        return Cell(number(row.mean) + ("" if row.std is None else f" ± {number(row.std)}"), row.mean, seeds)

    def _difference(self, name: str, to: str) -> Cell | None:
        found: Difference | None = getattr(self.score(name), to, None)
        if found is None:
            return None
        text, half = f"{found.mean:+.{self.metric.decimals}f}".replace("-", "−"), (found.high - found.low) / 2
        return Cell(f"{text} ± {half:.3g}" if isfinite(half) else text, found.mean, found.verdict)

    def _mean(self, name: str, field: str) -> Cell | None:
        found = [row[field] for row in self.of("run", name) if row.get(field) is not None]
        if not found:
            return None
        spread = f" ± {self.metric.number(stdev(found))}" if len(found) > 1 else ""
        return Cell(f"{self.metric.number(fmean(found))}{spread}", fmean(found))

    def _gap(self, name: str) -> Cell | None:
        entropy, reference = self.field(name, "entropy"), self.field(REFERENCE, "entropy")
        if name == REFERENCE or None in (entropy, reference):
            return None
        return Cell(Unit(decimals=2, signed=True).text(entropy - reference), entropy - reference)

    def _numbers(
        self, title: str, field: str, unit_text: str, prefixes: Prefixes = PREFIXES, unit: Unit | None = None
    ) -> Column:
        found = {name: spread for name in self.names if (spread := self.spread(name, field))}
        unit = unit or common_unit((middle for middle, _, _ in found.values()), prefixes=prefixes)
        cells = {
            name: Cell(unit.text(middle), middle, f"{unit.text(low)} to {unit.text(high)}" if low < high else "")
            for name, (middle, low, high) in found.items()
        }
        return Column(title, f"{unit.prefix}{unit_text}".strip(), cells)
