"""Functions that take the progress messages of long work."""

from collections.abc import Callable

OnWork = Callable[[str], None]


def in_silence(_: str) -> None:
    """Ignore the message."""
