"""Threads that are waited for, with a word now and then."""

import time
from collections.abc import Callable
from threading import Thread


def run_all(parts: list[Thread], seconds: float, tell: Callable[[], None]) -> None:
    """Start them and wait for all; ``tell`` is called every so many seconds, and at the end."""
    for part in parts:
        part.start()
    while any(part.is_alive() for part in parts):
        until = time.monotonic() + seconds
        for part in parts:
            part.join(timeout=max(0.0, until - time.monotonic()))
        tell()
