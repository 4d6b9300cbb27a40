"""A grid of settings, the same for every model, from which validation data chooses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from linattn.lab.compare.cells import Cell
from linattn.lab.compare.graph.settings import GraphCompareConfig, Point
from linattn.lab.train.graph.epochs import NotFiniteError
from linattn.lab.train.graph.loop import GraphResult


class Tried(NamedTuple):
    """A point of the grid at one learning rate, with its mean score on validation data; NaN if a run failed."""

    lr: float
    weight_decay: float | None
    dropout: float | None
    val: float
    seconds: float


class Grid:
    """Tries the points of a grid. ``train(cell, point, folder)`` trains a run, or loads its result from the folder."""

    def __init__(self, config: GraphCompareConfig, train: Callable[[Cell, Point, Path], GraphResult]) -> None:
        self.config, self.train = config, train
        self._tried: dict[tuple[str, float], list[Tried]] = {}

    def best(self, cell: Cell) -> Tried | None:
        """The best point for the cell's model and learning rate; among equals the first. None if there is no grid."""
        points = self.config.points
        if len(points) < 2 and points[0] == Point():
            return None
        key = cell.mechanism, cell.lr
        if key not in self._tried:
            # A single point leaves no choice and needs no run: all runs are trained with it.
            self._tried[key] = [self._try(cell, point) for point in points] if len(points) > 1 else []
        found = [tried for tried in self._tried[key] if tried.val == tried.val]
        if len(points) > 1 and not found:
            raise RuntimeError(f"no point of the grid could be trained with lr {cell.lr:g}")
        return max(found, key=lambda tried: tried.val) if found else Tried(cell.lr, *points[0], float("nan"), 0.0)

    def tried(self, model: str) -> list[Tried]:
        """All points that were tried for a model, at every learning rate."""
        return [tried for (name, _), found in self._tried.items() if name == model for tried in found]

    def _try(self, cell: Cell, point: Point) -> Tried:
        scores, seconds = [], 0.0
        for seed in range(self.config.grid_seeds):
            own = replace(cell, seed=seed, validation=True)
            folder = self.config.output / "grid" / own.folder(Path()).relative_to("sweep") / point.name
            try:
                found = self.train(own, point, folder)
            except NotFiniteError:  # other points may not fail
                return Tried(cell.lr, *point, float("nan"), seconds)
            scores.append(found.val)
            seconds += found.seconds
        return Tried(cell.lr, *point, mean(scores), seconds)
