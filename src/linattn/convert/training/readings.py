"""Losses of a stage, read from the device only when they are needed."""

from collections.abc import Iterable, Sequence
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor

from linattn.convert.training.setting import UnstableError

SECONDS_BETWEEN_READINGS = 0.2  # since reading a loss waits for the device


class Readings:
    """Losses by step, kept on the device until they are asked for.

    Args:
        what: names of the columns.
    """

    def __init__(self, what: Iterable[str], rows: Sequence[Sequence[float]] = ()) -> None:
        self.what = list(what)
        self._rows: list[list[float]] = [list(row) for row in rows]
        self._waiting: list[Tensor] = []
        self._last = perf_counter()

    def add(self, row: Tensor) -> None:
        """Add the losses of one step, ``(len(what),)``."""
        self._waiting.append(row)

    def rows(self) -> list[list[float]]:
        """The losses of all steps; raises if one is not finite."""
        if self._waiting:
            for row in torch.stack(self._waiting).tolist():
                for name, value in zip(self.what, row, strict=True):
                    if not isfinite(value):
                        raise UnstableError(name, len(self._rows))
                self._rows.append(row)
            self._waiting.clear()
        return self._rows

    def columns(self) -> list[list[float]]:
        """The losses of all steps, column by column."""
        rows = self.rows()
        return [[row[place] for row in rows] for place in range(len(self.what))]

    def look(self) -> list[float] | None:
        """The newest row, at most a few times a second; else None."""
        if perf_counter() - self._last < SECONDS_BETWEEN_READINGS:
            return None
        rows = self.rows()
        self._last = perf_counter()
        return rows[-1] if rows else None
