"""Tasks for a stack of models: each cell draws from the data of its case, with its own number of examples."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.lab.theory.icl.case import Case
from linattn.lab.theory.icl.data.base import DataModel


@dataclass(frozen=True, eq=False)
class Cell:
    """One model of a stack: a case, a number of examples, and which of several equal runs this is."""

    case: Case
    n: int
    seed: int


class Tasks(NamedTuple):
    """Tokens ``(M, B, T, d+1)`` and answers ``(M, B)``; labels are in units of their standard deviation."""

    tokens: Tensor
    answers: Tensor


class TaskStream:
    """Fresh tasks for the cells, in their order; all cells of a case must be adjacent.

    Tasks with fewer examples than the largest number have zeros in front. With ``sources`` tasks come from the data
    that a case was trained on before.
    """

    def __init__(self, cells: list[Cell], generator: torch.Generator, *, sources: bool = False) -> None:
        self.cells, self.generator = cells, generator
        self.most = max(cell.n for cell in cells)
        self.groups: list[tuple[DataModel, int]] = []  # data, number of cells
        for cell in cells:
            data = (cell.case.source or cell.case.data) if sources else cell.case.data
            if self.groups and self.groups[-1][0] is data:
                self.groups[-1] = data, self.groups[-1][1] + 1
            else:
                self.groups.append((data, 1))
        self.width = self.groups[0][0].d + 1
        device = generator.device
        counts = torch.tensor([cell.n for cell in cells], device=device)
        place = torch.arange(self.most, device=device)
        self.counts = counts
        self.real = (place >= self.most - counts.unsqueeze(1))[:, None, :, None].float()  # (M, 1, n, 1)

    def draw(self, batch: int) -> Tasks:
        M, T = len(self.cells), self.most + 1
        tokens = torch.zeros(M, batch, T, self.width, device=self.generator.device)
        answers = torch.empty(M, batch, device=self.generator.device)
        for (data, _), rows in zip(self.groups, self._rows(), strict=True):
            drawn = data.sample((rows.stop - rows.start, batch), self.most, self.generator)
            unit = data.power**-0.5
            torch.mul(drawn.x, self.real[rows], out=tokens[rows, :, :-1, :-1])
            torch.mul(drawn.y * unit, self.real[rows].squeeze(-1), out=tokens[rows, :, :-1, -1])
            tokens[rows, :, -1, :-1] = drawn.query
            answers[rows] = drawn.answer * unit
        return Tasks(tokens, answers)

    def _rows(self) -> Iterator[slice]:
        start = 0
        for _, count in self.groups:
            yield slice(start, start + count)
            start += count
