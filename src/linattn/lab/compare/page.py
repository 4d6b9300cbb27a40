"""The page of a comparison: what was found, the table, the charts, maps of attention, and every run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linattn.lab.compare.figures import charts_of, head_mean
from linattn.lab.compare.findings import Column, Findings
from linattn.lab.compare.maps import map_grid, map_names, save_map_png
from linattn.lab.page import Cell, Section, shown, write_page
from linattn.lab.page.markup import element, join
from linattn.lab.page.numbers import MISSING, Unit
from linattn.lab.page.plots import key
from linattn.lab.page.style import OUTLINES, styles

# Field -> title, explanation, decimals.
STATISTICS = {
    "entropy": ("Entropy", "Nats, mean over queries. High: a token spreads its attention over many others.", 3),
    "entropy_norm_correlation": (
        "Correlation of entropy and query norm",
        "Softmax attends more sharply where the query is long (below zero); a mechanism that divides the norm out "
        "cannot (near zero).",
        3,
    ),
    "positive_sequence_entropy": (
        "Positive-sequence entropy",
        "Nats. The entropy of the weights above zero; it differs from the entropy only where some are negative.",
        3,
    ),
    "effective_rank": (
        "Effective rank",
        "How many independent directions the attention map has; 1 if all rows are alike.",
        2,
    ),
    "energy_lost": (
        "Energy lost",
        "Share of the squared queries and keys that the feature map sets to zero; 0 where nothing is cut.",
        3,
    ),
    "opposed_kept": (
        "Opposed pairs kept",
        "Share of the interactions between entries of opposite sign that still reach the weights.",
        3,
    ),
}


def write_comparison(
    folder: Path,
    meta: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    examples: Mapping[str, Any] | None = None,
    more: Sequence[Section] = (),
) -> Path:
    """Write ``report.html`` and its charts into ``folder``; the same results give the same bytes.

    ``examples``: images with maps, ``{"layer": ..., "images": [{"label", "pixels", "token", "maps": {name: map}}]}``.
    ``more``: what a kind of comparison adds before the runs.
    """
    findings = Findings(meta, rows)
    found = [_results(findings), *_failures(findings)]
    found += [Section(chart.title, chart=chart) for chart in charts_of(findings)]
    if examples and map_names(findings.names, dict(examples)):
        save_map_png(findings.names, dict(examples), folder / "attention-maps.png")
        found.append(_maps(findings, dict(examples)))
    found += [*_layers(findings), *more, *_runs(findings)]
    found += [_facts(part.capitalize(), meta[part]) for part in ("data", "host") if meta.get(part)]
    data = meta.get("data", {}).get("name") or "unnamed data"
    title = f"{'Models' if meta.get('kind') == 'graph' else 'Attention mechanisms'} compared on {data}"
    lead, summary = f"{meta.get('about', '')}, on {meta.get('device', 'an unknown device')}.", findings.sentences
    return write_page(folder / "report.html", title, found, meta, lead[:1].upper() + lead[1:], " ".join(summary))


def table_of(columns: Mapping[str, Sequence[object]]) -> Any:
    import pandas

    return pandas.DataFrame(dict(columns), dtype=object)


def _results(findings: Findings) -> Section:
    look = styles(findings.names)
    heads: list[object] = []
    for name in findings.names:
        tag = [element("span", "reference", class_="tag")] if look[name].emphasised else []
        said = [element("small", words)] if (words := findings.options(name)) else []
        heads.append(Cell(join(key(name, look[name], OUTLINES[look[name].marker]), *tag, *said), name, html=True))
    columns: dict[str, Sequence[object]] = {"mechanism": heads}
    units = {}
    for column in findings.columns():
        title = column.title if column.title not in columns else f"{column.title} ({column.unit})"
        units[title] = column.unit
        columns[title] = [_cell(column, name) for name in findings.names]
    reading = (
        "Differences are paired by seed; their intervals hold for all pairs of mechanisms together. Speeds are the "
        "median of repeats, with the slowest and the fastest. State: what is kept to go on from. Peak memory: of one "
        f"training step. Entropy gap: to softmax, zero where attention is as selective. {MISSING}: not measured, or "
        "there is none."
    )
    return Section("Results", reading, table_of(columns), units)


def _cell(column: Column, name: str) -> Cell:
    note = [element("small", column.notes[name])] if name in column.notes else []
    return Cell(join(column.texts.get(name, MISSING), *note), column.values.get(name), html=True)


def _failures(findings: Findings) -> list[Section]:
    failed = [row for row in findings.rows if row.get("error")]
    items = [
        element("li", element("b", f"{row['mechanism']}, seed {row.get('seed', MISSING)}"), f": {row['error']}")
        for row in failed
    ]
    return [Section("Failed runs", html=element("ul", *items, class_="failed"))] if failed else []


def _maps(findings: Findings, examples: dict[str, Any]) -> Section:
    layer = f" in the layer {examples['layer']}" if examples.get("layer") else ""
    reading = (
        f"Where the token in the bright frame looks{layer}. Each square is one token of the image; the brighter it is, "
        "the more weight it has. Every map is scaled to its own largest weight, so compare shapes, not brightness."
    )
    return Section("Attention on example images", reading, html=map_grid(findings.names, examples))


def _layers(findings: Findings) -> list[Section]:
    """A folded table for each statistic: mechanisms as rows, layers as columns, each number a mean over heads."""
    names = [name for name in findings.names if findings.layers(name)]
    found = []
    for field, (title, meaning, decimals) in STATISTICS.items():
        means = {name: [head_mean(layer.get(field)) for layer in findings.layers(name)] for name in names}
        if all(value is None for values in means.values() for value in values):
            continue
        columns: dict[str, Sequence[object]] = {"mechanism": names}
        for number in range(max(map(len, means.values()))):
            values = [found[number] if number < len(found) else None for found in means.values()]
            columns[f"layer {number + 1}"] = [Cell(Unit(decimals=decimals).text(value), value) for value in values]
        found.append(Section(f"{title} by layer", f"{meaning} Means over heads.", table_of(columns), fold=True))
    return found


def _runs(findings: Findings) -> list[Section]:
    metric, found = findings.metric, []
    for kind, title, text in (
        ("run", "Every run", ""),
        ("sweep", "Learning rates tried", "On data held out for this choice; the test data decide nothing."),
    ):
        rows = findings.of(kind)
        if not rows:
            continue
        number = Unit(decimals=metric.decimals)
        # A run that chooses a rate and is final has both scores.
        both = [row["validation"] if kind == "sweep" else None for row in rows]
        scores = [
            found if isinstance(found, float) else row.get("score") for found, row in zip(both, rows, strict=True)
        ]
        columns = {
            "mechanism": [row["mechanism"] for row in rows],
            "seed": [row.get("seed") for row in rows],
            "learning rate": [f"{row['lr']:g}" if "lr" in row else None for row in rows],
            metric.name: [Cell(number.text(value), value) for value in scores],
            "seconds": [Cell(Unit(decimals=1).text(row.get("seconds")), row.get("seconds")) for row in rows],
        }
        found.append(Section(title, text, table_of(columns), {metric.name: metric.unit}, fold=True))
    return found


def _facts(title: str, values: Mapping[str, Any]) -> Section:
    """Names and values as a folded list."""
    items = [
        element("div", element("dt", name.replace("_", " ")), element("dd", shown(value)))
        for name, value in values.items()
    ]
    return Section(title, html=element("dl", *items), fold=True)
