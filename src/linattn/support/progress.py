"""Progress on the standard error: a bar where rich is installed, else a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

Report = Callable[[int, int, str], None]
"""Called with the steps done, the steps in all, and words that say how the work goes."""

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def reported(name: str, *, hidden: bool) -> Iterator[Report]:
    """Yield a function that shows the progress of the work called ``name``; a bar disappears at the end."""
    if hidden or find_spec("rich") is None:
        yield _nothing if hidden else _Lines(name)
        return
    with step_bar(1, None, hidden=False) as (progress, task):

        def report(done: int, steps: int, words: str) -> None:
            progress.update(task, completed=done, total=steps, description=f"{name}  {words}")

        yield report


def _nothing(done: int, steps: int, words: str) -> None:
    """Show nothing."""


class _Lines:
    def __init__(self, name: str) -> None:
        self.name, self.said = name, time.monotonic()

    def __call__(self, done: int, steps: int, words: str) -> None:
        if time.monotonic() - self.said > SECONDS_BETWEEN_LINES:
            self.said = time.monotonic()
            print(f"{100 * done / max(steps, 1):3.0f} %  {self.name}  {words}", file=sys.stderr, flush=True)


@contextmanager
def step_bar(steps: int, console: "Console | None", *, hidden: bool) -> "Iterator[tuple[Progress, TaskID]]":
    """A bar of ``steps`` steps, with elapsed and remaining time."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    progress = Progress(
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
        transient=True,
        disable=hidden,
    )
    with progress:
        yield progress, progress.add_task("starting", total=steps)
