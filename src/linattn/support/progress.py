"""Progress on the standard error: a bar where rich is installed, else a line now and then; and silence."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

Report = Callable[[int, int, str], None]
"""Called with the steps done, the steps in all, and words that say how the work goes."""

OnWork = Callable[[str], None]
"""Takes the messages of long work."""

SECONDS_BETWEEN_LINES = 10.0


def in_silence(_: str) -> None:
    """Ignore a message of long work."""


@contextmanager
def reported(name: str, *, hidden: bool) -> Iterator[Report]:
    """Yield a function that shows the progress of the work called ``name``; a bar disappears at the end."""
    if hidden or find_spec("rich") is None:
        yield (lambda done, steps, words: None) if hidden else _lines(name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.description}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=1)

        def report(done: int, steps: int, words: str) -> None:
            progress.update(task, completed=done, total=steps, description=f"{name}  {words}")

        yield report


def _lines(name: str) -> Report:
    said = time.monotonic()

    def report(done: int, steps: int, words: str) -> None:
        nonlocal said
        if time.monotonic() - said > SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"{100 * done / max(steps, 1):3.0f} %  {name}  {words}", file=sys.stderr, flush=True)

    return report


@contextmanager
def without_bars(*, warnings: bool = True) -> Iterator[None]:
    """Silence transformers' bars for every file, which would break into a command's output, and maybe its warnings."""
    from transformers.utils import logging

    shown, before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if not warnings:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()
