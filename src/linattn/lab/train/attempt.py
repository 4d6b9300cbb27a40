"""Ends a training run as a command does: with a message and an exit code."""

from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

from linattn.lab.train.rounds import DivergedError
from linattn.support.checkpoint import ResumeError
from linattn.support.options import OptionError

FINISHED, DIVERGED, INTERRUPTED = 0, 1, 130
Result = TypeVar("Result")


def attempt(train: Callable[[], Result], console: Console, kept: str) -> tuple[Result | None, int]:
    """The result of ``train`` and an exit code. ``kept``: what is kept on Ctrl-C. A wrong folder is an option error."""
    try:
        return train(), FINISHED
    except ResumeError as error:
        raise OptionError("output", str(error)) from error
    except DivergedError as error:
        console.print(f"[bold red]{error}[/]")
        return None, DIVERGED
    except KeyboardInterrupt:
        console.print(f"[yellow]interrupted: {kept}, the same command goes on[/]")
        return None, INTERRUPTED
