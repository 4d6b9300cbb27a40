"""What the rows of a comparison say: scores and what they show, costs, the table of mechanisms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from linattn.lab.compare.comparison import Metric, scores_of
from linattn.lab.compare.cost import busy_words, speed_of
from linattn.lab.page.numbers import BINARY, PREFIXES, Unit, common_unit, listed
from linattn.lab.page.style import REFERENCE
from linattn.lab.statistics import LEAST_SEEDS, Difference, Row, Verdicts, compare_runs
from linattn.support.options import options_words

MIB = Unit(2**20, "Mi", 1)


@dataclass(frozen=True)
class Column:
    """A column of the table: for each name a text, the number that it stands for, and what is said below it."""

    title: str
    unit: str
    texts: dict[str, str]
    values: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict)


class Findings:
    """The rows of a comparison, with names for what its page asks of them.

    Example:
        >>> rows = [{"kind": "run", "mechanism": "relu", "seed": seed, "score": 90.0 + seed} for seed in (0, 2)]
        >>> Findings({}, rows).score("relu").mean
        91.0
    """

    def __init__(self, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        self.meta, self.rows, self.metric = meta, rows, Metric.of(meta)
        self.names = list(dict.fromkeys(row["mechanism"] for row in rows if row["kind"] in ("sweep", "run", "cost")))
        self.scores = scores_of(rows)

    def of(self, kind: str, name: str | None = None) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind and name in (None, row["mechanism"])]

    def field(self, name: str, field: str) -> Any:
        """A value of a mechanism's rows of costs, attention or runs; None where it was not measured."""
        rows = [*self.of("cost", name), *self.of("attention", name), *self.of("run", name)]
        return next((row[field] for row in rows if row.get(field) is not None), None)

    def is_reference(self, name: str) -> bool:
        """Whether this is softmax, whatever the width of its host, with or without Canon layers."""
        return (self.field(name, "pattern") or name) == REFERENCE

    @cached_property
    def verdicts(self) -> dict[str, Verdicts]:
        """What the scores show, by the width of the host, or under the empty text where all have the same."""
        groups: dict[str, dict[str, dict[int, float]]] = {}
        for name, scores in self.scores.items():
            if scores:
                groups.setdefault(str(self.field(name, "width") or ""), {})[name] = scores
        margin, unit = self.meta.get("config", {}).get("margin"), f" {self.metric.unit}" if self.metric.unit else ""
        return {
            width: compare_runs(group, next(filter(self.is_reference, group), ""), self.metric.higher, margin, unit)
            for width, group in groups.items()
        }

    def score(self, name: str) -> Row | None:
        """The scores of a mechanism with its differences to others; None without a finished run."""
        return next((row for found in self.verdicts.values() for row in found.rows if row.name == name), None)

    @property
    def sentences(self) -> list[str]:
        """What is shown, what is missing, and what may be doubted."""
        said = []
        failed = [row for row in self.of("run") if row.get("error")]
        if not self.meta.get("finished", True):
            said.append(f"Unfinished: {len(self.of('run')) - len(failed)} runs are done.")
        if failed:
            said.append(f"{len(failed)} of {len(self.of('run'))} runs failed and are left out.")
        for width, found in self.verdicts.items():
            claims = [self.lead(found), *found.sentences]
            said += [f"At width {width}: {claims[0]}", *claims[1:]] if len(self.verdicts) > 1 else claims
        if any(0 < len(scores) < LEAST_SEEDS for scores in self.scores.values()) and len(self.names) > 1:
            said.append(f"For {LEAST_SEEDS} seeds, of which those of this run are taken: {self.command_for_more()}.")
        return [words for words in [*said, self.edges(), busy_words(self.busy())] if words]

    def lead(self, found: Verdicts) -> str:
        row = next(row for row in found.rows if row.name == found.best)
        runs = f"{row.seeds} seed{'' if row.seeds == 1 else 's'}"
        return f"{found.best} has the best mean {self.metric.name}, {self.metric.text(row.mean)} over {runs}."

    def command_for_more(self) -> str:
        """The command of this comparison, with as many seeds as a claim needs."""
        words = str(self.meta.get("command", "linattn compare")).split(" ")
        if "--seeds" in words:
            place = words.index("--seeds")
            del words[place : place + 2]
        return " ".join([*(word for word in words if not word.startswith("--seeds=")), "--seeds", str(LEAST_SEEDS)])

    def edges(self) -> str:
        """Mechanisms whose learning rate is the lowest or highest of three or more: a better one may lie beyond."""
        words = []
        for name in self.names:
            tried = {row["lr"] for row in self.of("sweep", name)}
            lr = self.field(name, "lr")
            if len(tried) > 2 and lr in (min(tried), max(tried)):
                words.append(f"{name} ({'highest' if lr == max(tried) else 'lowest'}, {lr:g})")
        start = "At the edge of the learning rates that were tried, so that a better one may lie beyond: "
        return f"{start}{listed(words)}." if words else ""

    def busy(self) -> dict[str, float]:
        return {row["mechanism"]: row.get("busy") or 0.0 for row in self.of("cost")}

    def speed(self, name: str, way: str) -> tuple[float, float, float] | None:
        """Median, least and greatest speed; ``way``: forward or train."""
        return speed_of(self.field(name, f"{self.metric.counted}s_per_second_{way}"))

    def gap(self, name: str) -> float | None:
        """The entropy of attention less that of softmax."""
        entropy, reference = self.field(name, "entropy"), self.field(REFERENCE, "entropy")
        return None if entropy is None or reference is None or name == REFERENCE else entropy - reference

    def layers(self, name: str) -> list[Mapping[str, Any]]:
        return self.field(name, "layers") or []

    def options(self, name: str) -> str:
        """The options of a mechanism as they are typed."""
        return options_words(self.field(name, "options") or {})

    def columns(self) -> list[Column]:
        """The table of mechanisms; columns without any value are left out."""
        one = self.metric.counted
        found = [self._scores(), self._differences("reference")]
        if any(verdicts.best != verdicts.reference for verdicts in self.verdicts.values()):
            found.append(self._differences("best"))
        found += [self._means(part) for part in ("before", "converted")]
        found += [
            self._numbers("parameters", "", {name: self.field(name, "parameters") for name in self.names}, 4),
            self._numbers("operations", f"FLOPs/{one}", {name: self.field(name, "flops") for name in self.names}),
            self._numbers("state", " per layer", {name: self.field(name, "state_size") for name in self.names}),
            self._numbers(
                "state", "B per sequence", {name: self.field(name, "state_bytes") for name in self.names}, binary=True
            ),
            self._speeds("forward"),
            self._speeds("train"),
            self._numbers("peak memory", "B", {n: self.field(n, "peak_bytes_train") for n in self.names}, unit=MIB),
            self._numbers(
                "entropy gap", "nats", {n: self.gap(n) for n in self.names}, unit=Unit(decimals=2, signed=True)
            ),
        ]
        return [column for column in found if any(value is not None for value in column.values.values())]

    def short_table(self) -> tuple[list[str], list[list[object]]]:
        """The table for a screen: titles and rows, with intervals but without the spread of speeds."""
        left_out = ("to the best", "operations", "entropy gap", "forward", "state")
        columns = [column for column in self.columns() if column.title not in left_out]
        rows: list[list[object]] = []
        for name in self.names:
            row, cells = self.score(name), [column.texts.get(name, "") for column in columns]
            for number, column in enumerate(columns):
                found = row.to_reference if row and column.title.startswith("to ") else None
                if found and isfinite(found.high):
                    cells[number] += f" ± {(found.high - found.low) / 2:.3g}"
            rows.append([f"{name}\n{self.options(name)}".strip(), *cells])
        return ["mechanism", *(f"{column.title}\n{column.unit}".strip() for column in columns)], rows

    def csv_rows(self) -> list[dict[str, Any]]:
        """A row for each mechanism, in plain numbers."""
        rows = []
        for name in self.names:
            row = self.score(name)
            spread = {} if row is None else {
                "mean": row.mean, "std": row.std, "least": row.least, "greatest": row.greatest, "seeds": row.seeds,
            }  # fmt: skip
            for to, found in (("reference", row and row.to_reference), ("best", row and row.to_best)):
                if found:
                    spread |= {f"to_{to}": found.mean, f"to_{to}_low": found.low, f"to_{to}_high": found.high}
            costs = {key: value for part in self.of("cost", name) for key, value in part.items()}
            for way in ("forward", "train"):
                if speed := self.speed(name, way):
                    costs[f"{self.metric.counted}s_per_second_{way}"] = speed[0]
            seconds = [run["seconds"] for run in self.of("run", name) if run.get("seconds") is not None]
            more = {
                "lr": self.field(name, "lr"), "options": self.options(name), "entropy": self.field(name, "entropy"),
                "entropy_gap": self.gap(name), "train_seconds_mean": fmean(seconds) if seconds else None,
            }  # fmt: skip
            rows.append({"mechanism": name, **spread, **more, **costs})
        return [{key: value for key, value in row.items() if key != "kind"} for row in rows]

    def _scores(self) -> Column:
        texts, values, notes = {}, {}, {}
        for name in self.names:
            row = self.score(name)
            if row is not None:
                spread = "" if row.std is None else f" ± {self.metric.number(row.std)}"
                texts[name], values[name] = f"{self.metric.number(row.mean)}{spread}", row.mean
                low, high = self.metric.number(row.least), self.metric.number(row.greatest)
                notes[name] = f"{low} to {high}, {row.seeds} seeds" if row.seeds > 1 else "1 seed"
        return Column(self.metric.name, ", ".join(filter(None, (self.metric.unit, "mean ± std"))), texts, values, notes)

    def _differences(self, to: str) -> Column:
        def number(value: float) -> str:
            return f"{value:+.{self.metric.decimals}f}".replace("-", "−")

        texts, values, notes = {}, {}, {}
        for name in self.names:
            row = self.score(name)
            found: Difference | None = getattr(row, f"to_{to}") if row else None
            if found is not None:
                texts[name], values[name] = number(found.mean), found.mean
                bounds = f"{number(found.low)} to {number(found.high)}, " if isfinite(found.low) else ""
                notes[name] = f"{bounds}{found.verdict}"
        title = "softmax" if to == "reference" else "the best"
        return Column(f"to {title}", "95 % interval", texts, values, notes)

    def _means(self, part: str) -> Column:
        texts, values = {}, {}
        for name in self.names:
            found = [row[part] for row in self.of("run", name) if row.get(part) is not None]
            if found:
                spread = f" ± {self.metric.number(stdev(found))}" if len(found) > 1 else ""
                texts[name], values[name] = f"{self.metric.number(fmean(found))}{spread}", fmean(found)
        return Column(part, self.metric.unit, texts, values)

    def _numbers(
        self, title: str, unit_text: str, values: dict[str, Any], digits: int = 3, binary: bool = False,
        unit: Unit | None = None,
    ) -> Column:  # fmt: skip
        unit = unit or common_unit(values.values(), digits, BINARY if binary else PREFIXES)
        texts = {name: unit.text(value) for name, value in values.items() if value is not None}
        return Column(title, f"{unit.prefix}{unit_text}".strip(), texts, values)

    def _speeds(self, way: str) -> Column:
        speeds = {name: speed for name in self.names if (speed := self.speed(name, way))}
        unit = common_unit([speed[0] for speed in speeds.values()])
        texts = {name: unit.text(middle) for name, (middle, _, _) in speeds.items()}
        notes = {
            name: f"{unit.text(low)} to {unit.text(high)}" for name, (_, low, high) in speeds.items() if low < high
        }
        title, values = "training" if way == "train" else way, {name: speed[0] for name, speed in speeds.items()}
        return Column(title, f"{unit.prefix} {self.metric.counted}s/s".strip(), texts, values, notes)
