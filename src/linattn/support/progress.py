"""A progress bar: share done, a few words, elapsed and remaining time."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def step_bar(steps: int, console: Console | None, *, hidden: bool) -> Iterator[tuple[Progress, TaskID]]:
    """A bar of ``steps`` steps, with elapsed and remaining time."""
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
