"""Folded details of a report: statistics per layer, learning rates, every run, and failures."""

from linattn.lab.page.markup import Markup, element, join
from linattn.lab.page.numbers import MISSING, Unit, counted
from linattn.lab.pages.read import Comparison, head_mean, number
from linattn.lab.pages.table import Cell, Column, table

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


def fold(title: str, *content: str, count: str = "") -> Markup:
    """A section that opens when it is clicked."""
    note = [element("span", count, class_="unit")] if count else []
    return element("details", element("summary", element("span", title), *note), *content)


def layer_details(comparison: Comparison) -> list[Markup]:
    """One table per statistic: mechanisms as rows, layers as columns, each number a mean over heads."""
    names = [name for name in comparison.names if comparison.layers(name)]
    return [part for field in STATISTICS if (part := _statistic(comparison, names, field)) is not None]


def _statistic(comparison: Comparison, names: list[str], field: str) -> Markup | None:
    title, meaning, decimals = STATISTICS[field]
    means = [[head_mean(layer.get(field)) for layer in comparison.layers(name)] for name in names]
    if all(value is None for values in means for value in values):
        return None
    unit = Unit(decimals=decimals)
    columns = []
    for i in range(max(map(len, means))):
        values = [layers[i] if i < len(layers) else None for layers in means]
        columns.append(Column(f"layer {i + 1}", "", [Cell(unit.text(value), value) for value in values]))
    return fold(title, element("p", meaning), table(title, "mechanism", names, names, columns))


def sweep_details(comparison: Comparison) -> Markup | None:
    """Accuracy on held-out training data for each learning rate that was tried."""
    metric = comparison.metric
    sweeps = {name: comparison.entry(name).get("sweep") or [] for name in comparison.names}
    sweeps = {name: sweep for name, sweep in sweeps.items() if sweep}
    rates = list(dict.fromkeys(trial["lr"] for sweep in sweeps.values() for trial in sweep))
    if not rates:
        return None
    columns = []
    for rate in rates:
        cells = []
        for sweep in sweeps.values():
            score = next((number(trial.get(metric.field)) for trial in sweep if trial["lr"] == rate), None)
            cells.append(Cell(Unit(decimals=metric.decimals).text(score), score))
        columns.append(Column(f"{rate:g}" if number(rate) is not None else str(rate), "", cells))
    chosen = [comparison.entry(name).get("lr") for name in sweeps]
    columns.append(Column("chosen", "", [Cell(_rate(rate), number(rate)) for rate in chosen]))
    held_out = "a part of the training data held out" if comparison.words.unit == "images" else "data held out"
    meaning = f"{metric.title}, on {held_out} for this choice; the test data is never looked at."
    return fold(
        "Learning rates tried",
        element("p", meaning),
        table("Learning rates", "mechanism", *2 * (list(sweeps),), columns),
    )


def run_details(comparison: Comparison) -> Markup:
    rows, metric = comparison.rows, comparison.metric
    names = [row["mechanism"] for row in rows]
    columns = [
        Column("seed", "", [Cell(_text(row.get("seed")), number(row.get("seed"))) for row in rows]),
        Column("learning rate", "", [Cell(_rate(row.get("lr")), number(row.get("lr"))) for row in rows]),
        Column("status", "", [Cell(_text(row.get("status")), _text(row.get("status"))) for row in rows]),
        _numbers(metric.name, metric.unit, metric.field, metric.decimals, comparison),
        _numbers("training", "s", "train_seconds", 1, comparison),
    ]
    return fold("Every run", table("Runs", "mechanism", names, names, columns), count=counted(len(rows), "run"))


def _numbers(title: str, unit: str, field: str, decimals: int, comparison: Comparison) -> Column:
    values = [number(row.get(field)) for row in comparison.rows]
    return Column(title, unit, [Cell(Unit(decimals=decimals).text(value), value) for value in values])


def failures(comparison: Comparison) -> Markup | None:
    """Runs that failed, with their reasons: always visible, not folded."""
    failed = comparison.runs(status="failed")
    if not failed:
        return None
    items = []
    for row in failed:
        what = element("b", f"{row['mechanism']}, seed {_text(row.get('seed'))}")
        items.append(element("li", what, join(": ", str(row.get("reason") or "no reason was recorded"))))
    return element("section", element("h2", "Failed runs"), element("ul", *items, class_="failed"), id="failed")


def _rate(value: object) -> str:
    found = number(value)
    return MISSING if found is None else f"{found:g}"


def _text(value: object) -> str:
    return MISSING if value is None else str(value)
