"""Of a cross product of parameters, cells that meet every pair of values: what fails takes two of them at most."""

from collections.abc import Hashable, Sequence
from itertools import combinations

Cell = tuple[Hashable, ...]


def covering(cells: Sequence[Cell]) -> list[Cell]:
    """Some of ``cells``, each a value on every axis: each pair of values of two axes is among them.

    Greedy: always the cell with most pairs that were not met, the first of equals.
    """
    missing = {pair for cell in cells for pair in _pairs(cell)}
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(_pairs(cell) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[Hashable, ...]]:
    return {(i, j, cell[i], cell[j]) for i, j in combinations(range(len(cell)), 2)}
