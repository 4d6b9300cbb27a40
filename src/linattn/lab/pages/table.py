"""The table of results: one row per mechanism, one unit per column."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linattn.lab.page.markup import Markup, element, join
from linattn.lab.page.numbers import BINARY, MISSING, PREFIXES, Prefixes, Unit, common_unit, counted
from linattn.lab.page.plots import key
from linattn.lab.page.style import OUTLINES, REFERENCE, Style, styles
from linattn.lab.pages.read import Comparison

MIB = Unit(2**20, "Mi", 1)
PERCENT = Unit(decimals=2)


@dataclass(frozen=True)
class Cell:
    """A cell; the column is sorted by ``value``."""

    shown: str
    value: float | str | None = None


@dataclass(frozen=True)
class Column:
    title: str
    unit: str
    cells: list[Cell]
    unasked: bool = False
    """Comparisons of this kind never measure it."""


def results_table(comparison: Comparison) -> Markup:
    """The table of results; it can be sorted if scripts run, and is complete without them."""
    look = styles(comparison.names)
    heads = [_name(name, look[name], comparison.options(name)) for name in comparison.names]
    numbers = [_accuracy_column(comparison), *(make(comparison) for make in MEASURED)]
    numbers = [column for column in numbers if not column.unasked]
    return table("Results", "mechanism", heads, comparison.names, numbers)


def table(label: str, first: str, heads: Sequence[str], values: Sequence[str], columns: Sequence[Column]) -> Markup:
    """A table that scrolls in its own box; ``heads`` are the row headers, which are sorted by ``values``."""
    titles = [element("th", first, scope="col")]
    for column in columns:
        unit = [element("span", column.unit, class_="unit")] if column.unit else []
        titles.append(element("th", element("span", column.title), *unit, scope="col", class_="number"))
    rows = []
    for i, (head, value) in enumerate(zip(heads, values, strict=True)):
        cells = [column.cells[i] for column in columns]
        found = [element("td", c.shown, class_="number", data_value=_plain(c.value)) for c in cells]
        kind = "reference" if value == REFERENCE else None
        rows.append(element("tr", element("th", head, scope="row", data_value=value), *found, class_=kind))
    body = element("table", element("thead", element("tr", *titles)), element("tbody", *rows), class_="sortable")
    return element("div", body, class_="scroll", role="region", aria_label=label, tabindex="0")


def _plain(value: float | str | None) -> str | None:
    return None if value is None else str(value)


def _name(name: str, style: Style, options: str) -> Markup:
    tag = [element("span", "reference", class_="tag")] if style.emphasised else []
    said = [element("small", options)] if options else []
    return join(key(name, style, OUTLINES[style.marker]), *tag, *said)


def _accuracy_column(comparison: Comparison) -> Column:
    cells, metric = [], comparison.metric
    for name in comparison.names:
        accuracy = comparison.accuracy(name)
        if accuracy is None:
            cells.append(Cell(MISSING))
            continue
        spread = "" if accuracy.std is None else f" ± {metric.number(accuracy.std)}"
        seeds = counted(accuracy.runs, "seed")
        low, high = metric.number(accuracy.low), metric.number(accuracy.high)
        small = seeds if accuracy.runs < 2 else f"{low}–{high}, {seeds}"
        cells.append(Cell(join(f"{metric.number(accuracy.mean)}{spread}", element("small", small)), accuracy.mean))
    return Column(metric.name, ", ".join(filter(None, (metric.unit, "mean ± std"))), cells)


def _measured(
    title: str, unit_text: str, field: str, unit: Unit | None = None, digits: int = 3, images: bool | None = None,
    optional: bool = False, prefixes: Prefixes = PREFIXES,
) -> Callable[[Comparison], Column]:  # fmt: skip
    """A column of one field; ``{}`` in the text is the unit's prefix.

    ``images``: only for images, or only for text. ``optional``: left out if no mechanism has the field.
    """

    def make(comparison: Comparison) -> Column:
        unasked = images is not None and images != (comparison.words.unit == "images")
        values = [comparison.value(name, field) for name in comparison.names]
        unasked = unasked or (optional and all(value is None for value in values))
        chosen = unit or common_unit(values, digits, prefixes)
        cells = [Cell(chosen.text(value), value) for value in values]
        return Column(title, unit_text.format(chosen.prefix).strip(), cells, unasked)

    return make


MEASURED = (
    _measured("before", "% top-1, as softmax", "top1_before_mean", PERCENT, optional=True),
    _measured("converted", "% top-1, untrained", "top1_converted_mean", PERCENT, optional=True),
    _measured("parameters", "{}", "parameters", digits=4),
    _measured("operations", "{}FLOPs/image", "flops", images=True),
    _measured("state", "{} per layer", "state_size", images=True),
    _measured("state", "{}B per sequence", "state_bytes", images=False, prefixes=BINARY),
    _measured("forward", "images/s", "images_per_second_forward", Unit(), images=True),
    _measured("training", "images/s", "images_per_second_train", Unit(), images=True),
    _measured("forward", "{} tokens/s", "tokens_per_second_forward", images=False),
    _measured("training", "{} tokens/s", "tokens_per_second_train", images=False),
    _measured("peak memory", "{}B", "peak_bytes_train", MIB),
    _measured("entropy gap", "nats", "entropy_gap", Unit(decimals=2, signed=True), images=True),
)
