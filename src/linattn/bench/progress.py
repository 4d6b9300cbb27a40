"""The progress of a benchmark: rows done, time, what is under way."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def row_progress() -> Progress:
    """A bar on stderr, so that what is printed can be piped; it goes away at the end."""
    return Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    )
