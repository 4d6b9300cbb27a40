"""A comparison as a user sees it: a table that fills up while runs go on, and the final one."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from linattn.compare.cells import Cell, CellResult
from linattn.compare.results import Results
from linattn.report.numbers import counted
from linattn.train.records import EpochRecord


class Screen:
    """On a terminal a live table; elsewhere one line for every finished run."""

    def __init__(self, results: Results, console: Console) -> None:
        self.results, self.console = results, console
        self.now, self.total, self.done = "", 0, 0
        self._started, self._live = monotonic(), Live(console=console, transient=True, auto_refresh=False)

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with self._live:
            yield

    def expect(self, runs: int) -> None:
        self.total += runs

    def on_step(self, cell: Cell, epoch: int, step: int, loss: float, top1: float) -> None:
        epochs = self.results.config.train.epochs
        self._show(f"{cell.title}: epoch {epoch + 1} of {epochs}, loss {loss:.3f}, training top-1 {top1:.1f} %")

    def on_epoch(self, cell: Cell, record: EpochRecord) -> None:
        self._show(f"{cell.title}: epoch {record.epoch + 1} done, test top-1 {record.top1:.1f} %")

    def on_work(self, what: str) -> None:
        self._show(what)

    def on_result(self, result: CellResult) -> None:
        self.done += 1
        if not self.console.is_terminal:
            words = f"{result.top1:.2f} %" if result.top1 is not None else f"{result.status}: {result.reason}"
            kind = "validation" if result.cell.validation else "top-1"
            self.console.print(f"[{self.done}/{self.total}] {result.cell.title}: {kind} {words}", soft_wrap=True)
        self._show("")

    def _show(self, now: str) -> None:
        if not self.console.is_terminal:
            return
        self.now = now or self.now
        self._live.update(Group(progress_table(self.results), Text(self._line())), refresh=True)

    def _line(self) -> str:
        seconds = monotonic() - self._started
        left = ""
        if 0 < self.done < self.total:
            left = f", about {clock(seconds / self.done * (self.total - self.done))} left"
        return f"{self.done} of {counted(self.total, 'run')} in {clock(seconds)}{left}. {self.now}"


def progress_table(results: Results) -> Table:
    """Mechanisms with their runs so far."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("mechanism", "runs", "top-1 %", "lr"):
        table.add_column(title, justify="left" if title == "mechanism" else "right")
    for row in results.as_json()["mechanisms"]:
        lr = "" if row["lr"] is None else f"{row['lr']:g}"
        table.add_row(row["mechanism"], f"{row['runs']}/{results.config.seeds}", accuracy(row), lr)
    return table


def final_table(results: dict[str, Any]) -> Table:
    """One row a mechanism: accuracy and what it costs."""
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("mechanism", no_wrap=True)
    for title in ("top-1 %", "params", "MFLOP", "state", "img/s forward", "img/s train", "peak MiB", "entropy gap"):
        table.add_column(title, justify="right", no_wrap=title == "top-1 %")
    for row in results["mechanisms"]:
        table.add_row(
            row["mechanism"],
            accuracy(row),
            short(row.get("parameters")),
            _number(row.get("flops"), 1e6, ".1f"),
            short(row.get("state_size")),
            _number(row.get("images_per_second_forward")),
            _number(row.get("images_per_second_train")),
            _number(row.get("peak_bytes_train"), 2**20, ".1f"),
            _number(row.get("entropy_gap"), 1, "+.2f"),
        )
    return table


def accuracy(row: dict[str, Any]) -> str:
    """Mean and sample standard deviation over seeds."""
    if row["top1_mean"] is None:
        return ""
    return f"{row['top1_mean']:.2f}" + ("" if row["top1_std"] is None else f" ± {row['top1_std']:.2f}")


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def short(value: float | None) -> str:
    """Three digits and a unit: 86.4k, 2.68M."""
    if value is None:
        return ""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def _number(value: float | None, unit: float = 1, style: str = ",.0f") -> str:
    return "" if value is None else format(value / unit, style)
