"""The output of a comparison for users: a table that is filled during runs, and the final table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from linattn.lab.compare.cells import Cell, CellResult
from linattn.lab.compare.results import Results
from linattn.lab.page.numbers import binary, counted
from linattn.lab.pages.metric import Metric, Words
from linattn.lab.pages.read import Comparison
from linattn.support.checkpoint import RunFolder


class Screen:
    """Shows progress: a live table on a terminal, elsewhere one line for every finished run."""

    def __init__(self, results: Results, console: Console, total: int) -> None:
        self.results, self.console = results, console
        self.now, self.total, self.done = "", total, 0
        self.adopted: set[Cell] = set()
        self._kept: set[Cell] = set()  # finished by an earlier call, not printed yet
        self._trained = 0  # number of runs trained by this call
        self._started, self._live = monotonic(), Live(console=console, transient=True, auto_refresh=False)

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with self._live:
            yield

    def expect(self, cells: list[Cell], adopted: set[Cell]) -> None:
        """Set the runs still to come; those in ``adopted`` are not trained: they are printed but not counted."""
        self.adopted, self.total = adopted, self.done + len(cells) - len(adopted)

    def begin(self, cells: list[Cell], output: Path) -> None:
        """Begin these runs. Those that an earlier call finished take no time and do not count in the time left."""
        self._kept = {cell for cell in cells if RunFolder(cell.folder(output)).result.exists()} - self.adopted

    @property
    def metric(self) -> Metric:
        return self.results.subject.metric

    def on_step(self, cell: Cell, epoch: int, step: int, loss: float, accuracy: float) -> None:
        where = self.results.subject.step_words(epoch, step)
        self._show(f"{cell.title}: {where}, loss {loss:.3f}, right in training {accuracy:.1f} %")

    def on_record(self, cell: Cell, score: float, done: int) -> None:
        self._show(f"{cell.title}: evaluation {done} of {self.results.subject.rounds}, {self._score(score)}")

    def _score(self, score: float) -> str:
        return f"{self.metric.name} {self.metric.text(score)}"

    def on_work(self, what: str) -> None:
        self._show(what)

    def on_result(self, result: CellResult) -> None:
        adopted = result.cell in self.adopted
        earlier = result.cell in self._kept
        self._kept.discard(result.cell)
        self.done += 0 if adopted else 1
        self._trained += 0 if adopted or earlier else 1
        if not self.console.is_terminal:
            words = f"{result.status}: {result.reason}" if result.score is None else self.metric.text(result.score)
            kind = "validation" if result.cell.validation else self.metric.name
            when = "earlier in" if earlier else "in"
            took = "" if result.train_seconds is None else f", trained {when} {clock(result.train_seconds)}"
            count, left = f"[{self.done}/{self.total}] ", f"{took}{self._left()}"
            if adopted:
                count, left = "", ", trained while learning rates were chosen"
            line = f"{count}{result.cell.title}: {kind} {words}{left}"
            self.console.print(line, soft_wrap=True)
        self._show("")

    def _show(self, now: str) -> None:
        if not self.console.is_terminal:
            return
        self.now = now or self.now
        self._live.update(Group(progress_table(self.results), Text(self._line())), refresh=True)

    def _line(self) -> str:
        seconds = clock(monotonic() - self._started)
        return f"{self.done} of {counted(self.total, 'run')} in {seconds}{self._left()}. {self.now}"

    def _left(self) -> str:
        """The estimated time left, from the runs that this call has trained."""
        to_come = self.total - self.done - len(self._kept)
        if not self._trained or to_come <= 0:
            return ""
        seconds = monotonic() - self._started
        return f", about {clock(seconds / self._trained * to_come)} left"


def progress_table(results: Results) -> Table:
    """A table of mechanisms with their runs so far."""
    metric = results.subject.metric
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("mechanism", "runs", f"{metric.name} {metric.unit}".strip(), "lr"):
        table.add_column(title, justify="left" if title == "mechanism" else "right")
    for row in results.as_json()["mechanisms"]:
        lr = "" if row["lr"] is None else f"{row['lr']:g}"
        table.add_row(row["mechanism"], f"{row['runs']}/{results.config.seeds}", score_text(row, metric), lr)
    return table


def final_table(results: dict[str, Any]) -> Table:
    """A table with the score and the costs of each mechanism; columns without any measurement are left out."""
    metric, words = Metric.of(results["meta"]), Words.of(results["meta"])
    short_unit = {"images": "img", "tokens": "tok"}[words.unit]
    columns: list[tuple[str, str, Callable[[float | None], str]]] = [
        ("before", "top1_before_mean", lambda value: _number(value, 1, ".2f")),
        ("converted", "top1_converted_mean", lambda value: _number(value, 1, ".2f")),
        ("params", "parameters", short),
        ("MFLOP", "flops", lambda value: _number(value, 1e6, ".1f")),
        ("state", words.state, short if words.state == "state_size" else _bytes),
        (f"{short_unit}/s forward", words.speed(training=False), _number),
        (f"{short_unit}/s train", words.speed(training=True), _number),
        ("peak MiB", "peak_bytes_train", lambda value: _number(value, 2**20, ".1f")),
        ("entropy gap", "entropy_gap", lambda value: _number(value, 1, "+.2f")),
    ]
    rows, comparison = results["mechanisms"], Comparison(results)
    columns = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("mechanism", no_wrap=True)
    table.add_column(f"{metric.name} {metric.unit}".strip(), justify="right", no_wrap=True)
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    for row in rows:
        cells = [show(row.get(name)) for _, name, show in columns]
        name = f"{row['mechanism']} {comparison.options(row['mechanism'])}".strip()
        table.add_row(name, score_text(row, metric), *cells)
    return table


def score_text(row: dict[str, Any], metric: Metric) -> str:
    """Mean and sample standard deviation of the score over seeds, as text."""
    mean, std = row[f"{metric.field}_mean"], row[f"{metric.field}_std"]
    if mean is None:
        return ""
    return metric.number(mean) + ("" if std is None else f" ± {metric.number(std)}")


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def _bytes(value: float | None) -> str:
    return "" if value is None else binary(value)


def short(value: float | None) -> str:
    """A number with three digits and a unit: 86.4k, 2.68M."""
    if value is None:
        return ""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def _number(value: float | None, unit: float = 1, style: str = ",.0f") -> str:
    return "" if value is None else format(value / unit, style)
