"""What a command shows: words and tables on the standard output, progress on the standard error."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from linattn.support.config import as_json

Draw = Callable[[float, str], None]
WIDTH = 140  # of tables that are piped
SECONDS_BETWEEN_LINES = 10.0  # of progress that is piped into a file


class Bar:
    """Progress of long work: drawn by ``draw``, else a line now and then on ``console``, if there is one."""

    def __init__(self, total: float, console: Console | None = None, draw: Draw | None = None) -> None:
        self.total, self.done, self.console, self.draw, self.said = total, 0.0, console, draw, time.monotonic()

    def show(self, done: float, words: str) -> None:
        """Say how much of the total is done, and what is under way."""
        self.done = done
        if self.draw is not None:
            self.draw(done, words)
        elif self.console is not None and time.monotonic() - self.said > SECONDS_BETWEEN_LINES:
            self.said = time.monotonic()
            self.console.print(f"{100 * done / max(self.total, 1e-9):3.0f} %  {words}", soft_wrap=True)


class Screen:
    """Where a command writes. ``as_json``: the results alone, as JSON; ``quiet``: no progress and no words."""

    def __init__(self, *, quiet: bool = False, as_json: bool = False) -> None:
        self.quiet, self.as_json = quiet or as_json, as_json
        self.out = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
        self.err = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        if not self.quiet:
            self.out.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Words that are shown in any case, beside the results."""
        self.err.print(text, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Words on the way, above the progress."""
        if not self.quiet:
            self.warn(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table of texts and numbers; the first column has names."""
        if self.quiet:
            return
        shown = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
        for number, name in enumerate(columns):
            cells = [str(row[number]) for row in rows if row[number] not in (None, "")]
            numbers = number > 0 and all(cell[0] in "0123456789.+-−–~" for cell in cells)
            shown.add_column(name, justify="right" if numbers else "left", overflow="fold", no_wrap=not number)
        for row in rows:
            shown.add_row(*("" if cell is None else str(cell) for cell in row))
        self.out.print(shown)

    def result(self, value: Mapping[str, Any] | Sequence[Any]) -> None:
        """The results for a machine to read, where these were asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps(as_json(value)) + "\n")

    @contextmanager
    def progress(self, total: float) -> Iterator[Bar]:
        if self.quiet or not self.err.is_terminal:
            yield Bar(total, None if self.quiet else self.err)
            return
        words = TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.description}")
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        with Progress(BarColumn(bar_width=24), *words, *times, console=self.err, transient=True) as bar:
            task = bar.add_task("starting", total=total)
            yield Bar(total, draw=lambda done, words: bar.update(task, completed=done, description=words))
