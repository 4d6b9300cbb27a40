"""Tables of `linattn compare`: on images, and on text and tasks of sequences."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from readme_parts import chart_line, markdown, three_digits, where

from linattn.lab.statistics import Verdicts, compare_runs

REFERENCE = "softmax"
EDGES = "↑ and ↓: the highest and the lowest learning rate that was tried, so that a better one may lie beyond."
COSTS: dict[str, tuple[str, Callable[[float], str]]] = {  # column -> the cost it shows
    "parameters": ("parameters", "{:,.0f}".format),
    "state, KiB": ("state_bytes", lambda value: three_digits(value / 2**10)),
    "images/s forward": ("images_per_second_forward", "{:,.0f}".format),
    "images/s training": ("images_per_second_train", "{:,.0f}".format),
    "million tokens/s, training": ("tokens_per_second_train", lambda value: three_digits(value / 1e6)),
    "peak memory, MiB": ("peak_bytes_train", lambda value: f"{value / 2**20:,.0f}"),
}


class Table:
    """The rows of a comparison by mechanism, and the cells that are made of them."""

    def __init__(self, path: Path) -> None:
        self.path, result = path, json.loads(path.read_text())
        self.meta, self.rows = result["meta"], result["rows"]
        self.metric = self.meta["metric"]
        self.names = list(dict.fromkeys(row["mechanism"] for row in self.rows if row["kind"] == "run"))

    def of(self, kind: str, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if (row["kind"], row.get("mechanism")) == (kind, name)]

    def scores(self, key: str = "score") -> dict[str, dict[int, float]]:
        """The scores of each mechanism by seed."""
        found = {name: {row["seed"]: row.get(key) for row in self.of("run", name)} for name in self.names}
        return {name: {seed: x for seed, x in runs.items() if x is not None} for name, runs in found.items()}

    def verdicts(self) -> Verdicts:
        unit = f" {self.metric['unit']}".rstrip()
        return compare_runs(self.scores(), REFERENCE, self.metric["higher"], unit=unit)

    def number(self, value: float) -> str:
        return f"{value:.{self.metric['decimals']}f}"

    def spread(self, name: str, key: str = "score") -> str:
        scores = {name: self.scores(key)[name]}
        if not scores[name]:
            return ""
        (row,) = compare_runs(scores).rows
        return self.number(row.mean) + ("" if row.std is None else f" ± {self.number(row.std)}")

    def rate(self, name: str) -> str:
        """The learning rate, with an arrow where it is an end of three or more that were tried."""
        tried = sorted({row["lr"] for row in self.of("sweep", name)})
        lr = self.of("run", name)[0]["lr"]
        edge = {tried[0]: " ↓", tried[-1]: " ↑"}.get(lr, "") if len(tried) > 2 else ""
        return f"{lr:g}{edge}" if tried else ""

    def cost(self, name: str, column: str) -> str:
        key, shown = COSTS[column]
        found = [row[key] for row in self.of("cost", name) if row.get(key) is not None]
        return shown(found[0]) if found else ""

    def seconds(self, name: str) -> str:
        """Seconds of a run, where runs are comparable: those on sequences."""
        found = [row["seconds"] for row in self.of("run", name) if row.get("seconds")]
        return f"{sum(found) / len(found):.0f}" if found and self.metric["counted"] == "token" else ""

    @property
    def title(self) -> str:
        return f"{self.metric['name']}{', ' + self.metric['unit'] if self.metric['unit'] else ''}"

    def page(self, head: list[str], lines: list[list[str]], *more: str) -> str:
        """The table without columns that are empty, under what it is of, and what it shows."""
        kept = [number for number in range(len(head)) if any(line[number] for line in lines)]
        shown = markdown([head[number] for number in kept], [[line[number] for number in kept] for line in lines])
        name, _, about = self.meta["about"].partition(", ")
        remark = [self.meta["remark"]] if "remark" in self.meta else []
        edges = [EDGES] if any(arrow in cell for line in lines for cell in line for arrow in "↑↓") else []
        said = [" ".join(self.verdicts().sentences), *edges]
        chart = chart_line(self.path, self.title)
        return "\n".join([f"**{name}**, {about}", where(self.meta), *remark, "", *shown, "", *more, *said, *chart, ""])


def comparison_text(path: Path) -> str:
    """A line a mechanism: scores, how far from the reference, and costs. With and without Canon layers side by side."""
    table = Table(path)
    if any("+" in name for name in table.names):
        return canon_text(table)
    head = ["mechanism", "before", "right after", f"{table.title}, mean ± std", "least to greatest"]
    head += [f"less {REFERENCE}, all intervals at once", "learning rate", *COSTS, "seconds a run"]
    lines = []
    for row in table.verdicts().rows:
        found = row.to_reference
        distance = "" if found is None else f"{found.mean:+.2f} ({found.low:+.1f} to {found.high:+.1f})"
        least, greatest = table.number(row.least), table.number(row.greatest)
        lines.append([
            f"`{row.name}`", table.spread(row.name, "before"), table.spread(row.name, "converted"),
            table.spread(row.name), f"{least} to {greatest}", distance, table.rate(row.name),
            *(table.cost(row.name, column) for column in COSTS), table.seconds(row.name),
        ])  # fmt: skip
    return table.page(head, lines)


def canon_text(table: Table) -> str:
    """A line a mechanism and width, without and with Canon layers side by side; then accuracies by kind of sequence."""
    hosts: dict[tuple[str, str], list[str]] = {}  # pattern and width -> its names by Canon layers
    canons = list(dict.fromkeys(_parts(name)[1] for name in table.names))
    for name in table.names:
        pattern, _, width = _parts(name)
        hosts.setdefault((pattern, width), []).append(name)
    columns = [column for column in COSTS if column != "peak memory, MiB"]
    head = ["mechanism", "width", *(f"{table.title}: {canon}" for canon in canons), "learning rate", *columns]
    lines = []
    for (pattern, width), names in hosts.items():
        costs = [_joined([table.cost(name, column) for name in names]) for column in columns]
        rates = _joined([table.rate(name) for name in names])
        seconds = _joined([table.seconds(name) for name in names])
        lines.append([f"`{pattern}`", width, *map(table.spread, names), rates, *costs, seconds])
    return table.page([*head, "seconds a run"], lines, *_kinds(table, hosts, canons))


def _kinds(table: Table, hosts: dict[tuple[str, str], list[str]], canons: list[str]) -> list[str]:
    """Where a test has sequences of several kinds, ``accuracy_64x4`` and so on: one column a kind."""
    kinds = list(dict.fromkeys(kind for row in table.rows for kind in row.get("metrics", ())))
    if not kinds:
        return []

    def mean(name: str, kind: str) -> str:
        values = [row["metrics"][kind] for row in table.of("run", name) if kind in row.get("metrics", ())]
        return f"{sum(values) / len(values):.1f}" if values else ""

    titles = [f"{kind.removeprefix('accuracy_').replace('x', ' tokens, ')} pairs" for kind in kinds]
    lines = [
        [f"`{pattern}`", width, *(_joined([mean(name, kind) for name in names]) for kind in kinds)]
        for (pattern, width), names in hosts.items()
    ]
    said = f"By length and number of pairs, accuracy in %: {' / '.join(canons)}."
    return [said, "", *markdown(["mechanism", "width", *titles], lines), ""]


def _parts(name: str) -> tuple[str, str, str]:
    """Pattern, Canon layers and width of a contender such as ``gated+ABCD 64``."""
    series, _, width = name.partition(" ")
    pattern, plus, canon = series.partition("+")
    return pattern, f"Canon {canon}" if plus else "no Canon", width


def _joined(cells: list[str]) -> str:
    """Side by side; once where all are the same."""
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)
