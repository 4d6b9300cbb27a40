"""Measures rows in separate processes, one after the other: a crash only loses what was under way."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from linattn.lab.bench.children import supervise

MOST_CHILDREN = 10


class Collects(Protocol):
    """A result that collects rows of any kind."""

    interrupted: bool

    def put(self, row: Any) -> None: ...


def rows_apart(
    target: Callable[..., None],
    arguments: Callable[[float], tuple[Any, ...]],
    result: Collects,
    seconds: float,
    *,
    on_row: Callable[[Any], None],
    on_work: Callable[[str], None],
    failed: Callable[[Any], Iterable[Any]],
    silent_seconds: float,
    before: Callable[[], None] = lambda: None,
    on_other: Callable[[str, Any], None] = lambda kind, value: None,
    most_children: int = MOST_CHILDREN,
) -> None:
    """Fill ``result`` by ``target(line, *arguments(seconds_left))`` in a child; after a crash another one goes on.

    The child sends "begin" before each thing that it measures, "row", and "work"; anything else goes to ``on_other``.
    ``failed(begun)`` makes the rows that a crash leaves open, without those that this run already has. ``before()`` is
    called first, within the same ``seconds``. Ctrl-C keeps the rows that are done.
    """
    deadline = time.perf_counter() + seconds
    begun: list[Any] = []
    children = 0

    def next_arguments() -> tuple[Any, ...]:
        nonlocal children
        children += 1
        return arguments(max(deadline - time.perf_counter(), 1e-3))

    def add(row: Any) -> None:
        result.put(row)
        on_row(row)

    def heard(kind: str, value: Any) -> None:
        if kind == "row":
            add(value)
        elif kind == "work":
            on_work(value)
        elif kind == "begin":
            begun.append(value)
        else:
            on_other(kind, value)

    def died(reason: str) -> bool:
        if not begun:  # the next one would die the same way
            raise RuntimeError(f"nothing was measured: {reason}")
        for row in failed(begun[-1]):
            row.status, row.reason = "failed", reason
            add(row)
        return children < most_children and time.perf_counter() < deadline

    try:
        before()
        supervise(target, next_arguments, heard, died, silent_seconds=silent_seconds)
    except KeyboardInterrupt:
        result.interrupted = True
