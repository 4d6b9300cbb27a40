"""How long work says how far it is, in words."""

from collections.abc import Callable

OnWork = Callable[[str], None]


def in_silence(_: str) -> None:
    """Nobody is told."""
