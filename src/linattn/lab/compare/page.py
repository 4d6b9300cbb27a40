"""The page of a comparison: what was found, the table, the charts, maps of attention, and every run; ``report``."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pandas import DataFrame

from linattn.lab.command import load
from linattn.lab.commands import COMMANDS
from linattn.lab.compare.figures import charts_of, maps, numbers_in
from linattn.lab.compare.findings import Findings
from linattn.lab.experiment import RIGHT, load_results
from linattn.lab.page import Cell, Section
from linattn.lab.page.numbers import MISSING, Unit
from linattn.lab.page.plots import REFERENCE, styles
from linattn.lab.screen import Screen
from linattn.support.config import Config, option
from linattn.support.options import OptionError

PARTS = ("models", "data", "host")  # of meta, shown as they are
POINT = ("lr", "weight_decay", "dropout")
STATISTICS = {
    "entropy": "Entropy",
    "entropy_norm_correlation": "Correlation of entropy and query norm",
    "positive_sequence_entropy": "Positive-sequence entropy",
    "effective_rank": "Effective rank",
    "energy_lost": "Energy lost",
    "opposed_kept": "Opposed pairs kept",
}
LAYERS = (
    "Means over heads. Entropy, in nats: high where a token spreads its attention over many others. Its correlation "
    "with the norm of the query: softmax attends more sharply where the query is long (below zero). Positive-sequence "
    "entropy: of the weights above zero. Effective rank: independent directions of the map. Energy lost: share of the "
    "squared queries and keys that the feature map sets to zero. Opposed pairs kept: share of the interactions between "
    "entries of opposite sign that still reach the weights."
)


@dataclass(frozen=True, kw_only=True)
class Report(Config):
    """Draw the charts and write the page of a comparison again, from the results in its folder.

    Exit code: 0 all right, 2 a folder without results.
    """

    folder: Path = option(Path(), "Folder with results.json, and examples.json if any.", argument=True)

    def run(self, screen: Screen) -> int:
        path = self.folder / "results.json"
        try:
            results = load_results(path)
            meta, rows = results["meta"], results["rows"]
            experiment: Any = load(meta["experiment"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            known = ", ".join(sorted(COMMANDS))
            raise OptionError("folder", f"needs the results.json of one of {known}: {path}: {error!r}") from error
        config = experiment.parse({**meta.get("config", {}), "output": self.folder})
        screen.say(f"page: {config.write_page(meta, rows)}")
        return RIGHT


def comparison_page(findings: Findings, examples: Mapping[str, Any]) -> tuple[Any, ...]:
    """The title, the sections, ``meta``, and what leads to them; the same results give the same page.

    ``examples``: images with maps, ``{"layer": ..., "images": [{"label", "pixels", "token", "maps": {name: map}}]}``.
    """
    meta, found = findings.meta, [_results(findings)]
    errors = {
        f"{row['mechanism']}, seed {row.get('seed', MISSING)}": row["error"]
        for row in findings.rows
        if row.get("error")
    }
    if errors:
        found.append(Section("Failed runs", facts=errors))
    charts = [*charts_of(findings), maps(findings.names, examples)]
    found += [Section(chart.title, chart=chart) for chart in charts if chart.panels]
    found += [*_layers(findings), *_runs(findings)]
    found += [Section(part.capitalize(), facts=meta[part], fold=True) for part in PARTS if meta.get(part)]
    data = meta.get("data", {}).get("name") or "unnamed data"
    title = f"{'Models' if meta.get('kind') == 'graph' else 'Attention mechanisms'} compared on {data}"
    lead = f"{meta.get('about', '')}, on {meta.get('device', 'an unknown device')}."
    return title, found, meta, lead[:1].upper() + lead[1:], " ".join(findings.sentences)


def _results(findings: Findings) -> Section:
    look = styles(findings.names)
    heads = [
        Cell(name, name, findings.options(name), look[name], "reference" if name == REFERENCE else "")
        for name in findings.names
    ]
    columns, units = {"mechanism": heads}, {}
    for column in findings.columns():
        title = column.title if column.title not in columns else f"{column.title} ({column.unit})"
        units[title] = column.unit
        columns[title] = [column.cells.get(name, Cell(MISSING)) for name in findings.names]
    reading = (
        "Differences are paired by seed; their intervals hold for all pairs of mechanisms together. Speeds are the "
        "median of repeats, with the slowest and the fastest. State: what is kept to go on from. Peak memory: of one "
        f"training step. Entropy gap: to softmax, zero where attention is as selective. {MISSING}: not measured, or "
        "there is none."
    )
    return Section("Results", reading, DataFrame(columns, dtype=object), units)


def _layers(findings: Findings) -> list[Section]:
    """A folded table: statistics of mechanisms as rows, layers as columns, each number a mean over heads."""
    rows = []
    for field, title in STATISTICS.items():
        for name in findings.names:
            heads = [numbers_in(layer.get(field)) for layer in findings.layers(name)]
            cells = {f"layer {number}": fmean(own) if own else None for number, own in enumerate(heads, 1)}
            rows += [{"statistic": f"{title}, {name}", **cells}] if cells else []
    return [Section("Attention by layer", LAYERS, DataFrame(rows, dtype=object), fold=True)] if rows else []


def _runs(findings: Findings) -> list[Section]:
    metric, found = findings.metric, []
    for kind, title, text in (
        ("run", "Every run", ""),
        ("sweep", "What was tried", "On data held out for this choice; the test data decide nothing."),
    ):
        rows = []
        for row in findings.of(kind):
            # A run that chooses a rate and is final has both scores.
            both = row["validation"] if kind == "sweep" else None
            score, seconds = both if isinstance(both, float) else row.get("score"), row.get("seconds")
            point = {key.replace("_", " "): f"{row[key]:g}" for key in POINT if key in row}
            named = {"mechanism": row["mechanism"], "seed": row.get("seed"), **point}
            named[metric.name] = Cell(Unit(decimals=metric.decimals).text(score), score)
            rows.append(named | {"seconds": Cell(Unit(decimals=1).text(seconds), seconds)})
        if rows:
            found.append(Section(title, text, DataFrame(rows, dtype=object), {metric.name: metric.unit}, fold=True))
    return found
